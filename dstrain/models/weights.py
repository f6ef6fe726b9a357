"""Weight files: read, checked, compared with a model, fingerprinted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import os.path
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.cache import file_digest, file_state
from dstrain.config.schema import ModelConfig
from dstrain.errors import CheckpointError, Fault, RecipeError, first_names
from dstrain.files import MAX_JSON_BYTES, parse_json, read_limited
from dstrain.models.folder import ADAPTER_CONFIG, read_adapter, resolve_base_model
from dstrain.models.params import assign, full_shape

if TYPE_CHECKING:
    import torch


INIT_KEY = "model.init"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training scripts save the state dict next to the optimizer's."""
ACCEPTED_FORMATS = (
    "a .safetensors file, a .pt, .pth or .bin file with a state dict, "
    "or a folder with *.safetensors or pytorch_model*.bin"
)
QUANTIZED_DTYPE = re.compile(r"(F8|I8|U8|I4|F4|float8|int8|uint8)\w*")
"""Dtypes of quantized values, which need scales."""
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
"""Patterns of weight files; the second counts only in a folder where the first matches nothing."""
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""Names of a complete model in one file, in the order of WEIGHT_PATTERNS."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file, read on demand."""

    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    """True for floats of 16 bits or more. Not for float8, which needs scales."""
    read: Callable[[], torch.Tensor]
    """Returns the values, on the host."""


def find_init_files(name: str) -> list[Path]:
    """Return the files that `model.init` names. Reads only headers, without torch. Raises RecipeError."""
    path = Path(name).expanduser()
    if not os.path.exists(path):  # Path.exists would raise OSError for a name that is too long
        problem = f"{name!r} is neither a file nor a folder (working directory: {Path.cwd()})"
        raise RecipeError(Fault(INIT_KEY, problem, f"give {ACCEPTED_FORMATS}; Hub ids are for model.path"))
    if (path / "recipe.yaml").is_file() and (path / "checkpoints").is_dir():
        fix = f"export it (dstrain export {name} --to DIR), then name DIR here, or as model.path"
        raise RecipeError(Fault(INIT_KEY, f"{name!r} is a run folder", fix))
    files = find_weight_files(path, INIT_KEY) if path.is_dir() else [path]
    if not files or (path.is_file() and path.suffix not in (".safetensors", *PICKLE_SUFFIXES)):
        problem = "holds no weights" if path.is_dir() else f"ends in '{path.suffix}'"
        raise RecipeError(Fault(INIT_KEY, f"{name!r} {problem}", f"give {ACCEPTED_FORMATS}"))
    faults = [
        Fault(INIT_KEY, f"{file} {fault}", "download or save it again")
        for file in files
        if (fault := find_file_problem(file))
    ]
    if faults:
        raise RecipeError(faults)
    return files


def find_weight_files(folder: Path, key: str) -> list[Path]:
    """Return the files that transformers would load, safetensors first. Raises RecipeError for the recipe's `key`."""
    for single, pattern in zip(SINGLE_FILES, WEIGHT_PATTERNS, strict=True):
        file = folder / single
        files = [file] if file.is_file() else read_shard_index(folder / f"{single}.index.json", key)
        files = files or sorted(folder.glob(pattern))
        if files:
            return files
    return []


def read_shard_index(index: Path, key: str) -> list[Path]:
    """Return the files in a shard index; an empty list without an index. Raises RecipeError for a bad index."""
    if not index.is_file():
        return []
    try:
        names = {*parse_json(read_limited(index, MAX_JSON_BYTES))["weight_map"].values()}
        files = sorted(index.parent / name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise RecipeError(Fault(key, f"{index} cannot be read ({error})", "download it again")) from None
    # An index from elsewhere may name any file of this host.
    outside = [name for name in sorted(names) if os.path.isabs(name) or ".." in Path(name).parts]
    if outside:
        problem = f"{index} names a file outside its folder: {outside[0]!r}"
        raise RecipeError(Fault(key, problem, "download the model again from a source that you trust"))
    return files


def find_file_problem(file: Path) -> str:
    """Return the problem of a weight file, by its header and size; an empty string for a good one."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return "is missing, but the shard index names it"
    try:
        with file.open("rb"):  # safetensors reports "No such file" for an unreadable one
            pass
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if file.suffix != ".safetensors":
        return ""
    try:
        with safe_open(str(file), framework="numpy"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"is damaged ({error})"


def open_tensors(files: Sequence[Path]) -> dict[str, LazyTensor]:
    """Return every tensor in the files, by key. Code in a file is never run. Raises RecipeError.

    Values in safetensors, and in files of torch.save since torch 1.6, stay on disk until they are read.
    """
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        new = _open_safetensors(file) if file.suffix == ".safetensors" else _open_pickle(file)
        if repeated := sorted(tensors.keys() & new.keys()):
            problem = f"{file} and another file in its folder both hold '{repeated[0]}'"
            raise RecipeError(Fault(INIT_KEY, problem, "name one of the files"))
        tensors |= new
    return tensors


def _open_safetensors(file: Path) -> dict[str, LazyTensor]:
    from safetensors import safe_open

    opened = safe_open(str(file), framework="pt")
    found = {}
    for name in opened.keys():  # noqa: SIM118  not a dict
        part = opened.get_slice(name)
        dtype = part.get_dtype()
        is_float = dtype in ("F64", "F32", "F16", "BF16")
        found[name] = LazyTensor(tuple(part.get_shape()), dtype, is_float, partial(opened.get_tensor, name))
    return found


def _open_pickle(file: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a torch.save file. Raises RecipeError for one that holds more than tensors."""
    import torch

    try:
        # weights_only refuses anything that would run code. Older formats than zip cannot be mapped.
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # any error, for a file with any content
        raise RecipeError(_pickle_fault(file, error)) from None
    return {
        name: LazyTensor(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            is_float=tensor.is_floating_point() and tensor.element_size() > 1,
            read=tensor.detach,
        )
        for name, tensor in _find_state_dict(loaded, file).items()
    }


def _pickle_fault(file: Path, error: Exception) -> Fault:
    message = str(error)
    forbidden = re.search(r"GLOBAL (\S+)", message)
    if forbidden:
        problem = f"{file} holds more than tensors: reading it would run '{forbidden[1]}', so it was not read"
        fix = "if you trust the file, save only its weights: torch.save(model.state_dict(), FILE), or as safetensors"
        return Fault(INIT_KEY, problem, fix)
    lines = message.rpartition("WeightsUnpickler error: ")[2].strip().splitlines() or ["it is truncated"]
    return Fault(INIT_KEY, f"{file} cannot be read ({type(error).__name__}: {lines[0]})", f"give {ACCEPTED_FORMATS}")


def _find_state_dict(loaded: Any, file: Path) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a loaded pickle, bare or nested under STATE_DICT_KEYS. Raises RecipeError without any."""
    import torch

    block: Any = loaded
    # The state dict may be nested twice: {"model": {"state_dict": ...}}.
    while isinstance(block, Mapping):
        inner = [block[key] for key in STATE_DICT_KEYS if isinstance(block.get(key), Mapping) and block[key]]
        if not inner:
            break
        block = inner[0]
    tensors = {}
    if isinstance(block, Mapping):
        tensors = {name: value for name, value in block.items() if isinstance(value, torch.Tensor)}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        content = type(loaded).__name__
        if isinstance(loaded, Mapping):
            content = f"a dict of {', '.join(map(str, [*loaded][:8]))}"
        fix = f"give a state dict, bare or under one of the keys {', '.join(STATE_DICT_KEYS)}"
        raise RecipeError(Fault(INIT_KEY, f"{file} holds {content}, not a state dict", fix))
    return tensors


def check_weight_files(model: ModelConfig, open_pickles: bool = True) -> None:
    """Raise RecipeError where a local folder has missing or damaged weight files. Reads only the headers of files.

    `open_pickles`: also check pytorch_model*.bin, which needs torch.
    """
    name = resolve_base_model(model).path
    folder = Path(name).expanduser() if name else None
    if folder is None or not folder.is_dir():
        return
    try:
        os.listdir(folder)  # glob takes an unreadable folder for an empty one
    except OSError as error:
        problem = f"'{name}' cannot be read ({error.strerror})"
        raise RecipeError(Fault("model.path", problem, "check the permissions of the folder")) from None
    if not has_weights(folder):
        raise RecipeError(
            Fault(
                "model.path",
                f"'{name}' holds no weights",
                "put *.safetensors there, or use model.config to train from scratch",
            )
        )
    shards = read_shard_index(folder / "model.safetensors.index.json", "model.path")
    faults = [
        Fault("model.path", f"{file} {fault}", _suggest_fix(fault))
        for file in sorted({*folder.glob("*.safetensors"), *shards})
        if (fault := find_file_problem(file))
    ]
    if faults:
        raise RecipeError(faults)
    # transformers prefers safetensors: pickles next to them are not read.
    if open_pickles and not any(folder.glob("*.safetensors")):
        try:
            for file in sorted(folder.glob("pytorch_model*.bin")):
                open_tensors([file])  # values stay on disk
        except RecipeError as error:
            raise RecipeError(replace(fault, where="model.path") for fault in error.faults) from error


def has_weights(folder: Path) -> bool:
    """Return True for a local folder with weight files, and for any Hub id."""
    if not folder.is_dir():
        return True
    return any(path for pattern in WEIGHT_PATTERNS for path in folder.glob(pattern))


def _suggest_fix(problem: str) -> str:
    if problem.startswith("cannot be read"):
        return "check the permissions of the file"
    return "download it again (`git lfs pull` if git left a pointer)"


MODEL_FILE = "model.safetensors"


def save_module(model: torch.nn.Module, folder: Path) -> None:
    """Write the state dict. A tensor with several names (tied) is written once, under the first."""
    from safetensors.torch import save_file

    tensors, storages = {}, set()
    for name, tensor in _unique_tensors(model).items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        # safetensors refuses tensors that share storage.
        tensors[name] = value.clone() if storage in storages else value
        storages.add(storage)
    save_file(tensors, str(folder / MODEL_FILE), metadata={"format": "pt"})


def load_module(model: torch.nn.Module, folder: Path) -> None:
    """Load the file's values into the module. Raises CheckpointError where keys or shapes differ.

    Collective under ZeRO-3.
    """
    file = folder / MODEL_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: holds no {MODEL_FILE}; export the run again")
    stored, tensors = open_tensors([file]), _unique_tensors(model)
    missing, unexpected = sorted(tensors.keys() - stored.keys()), sorted(stored.keys() - tensors.keys())
    if missing or unexpected:
        problem = f"missing keys: {first_names(missing)}; unexpected keys: {first_names(unexpected)}"
        raise CheckpointError(f"{file}: {problem}; give the task file and the options of the export")
    for name, tensor in tensors.items():
        if stored[name].shape != full_shape(tensor):
            shapes = f"{stored[name].shape} in the file and {full_shape(tensor)} in the task's model"
            raise CheckpointError(f"{file}: {name} is {shapes}; give the options of the export")
        assign(tensor, stored[name].read)


def _unique_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict, with each tensor once, under the first of its names."""
    import torch

    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


@contextmanager
def disable_transformers_logging(progress_bar: bool = False, warnings: bool = False) -> Iterator[None]:
    """Hide transformers' progress bars, its warnings, or both inside the context."""
    from transformers.utils import logging as transformers_logging

    level, was_shown = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    if progress_bar:
        transformers_logging.disable_progress_bar()
    if warnings:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if was_shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def load_report_disabled() -> Iterator[None]:
    """Hide transformers' LOAD REPORT inside the context: ModelValidator reports what matters of it."""
    log = logging.getLogger("transformers.modeling_utils")

    def keep_record(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    log.addFilter(keep_record)
    try:
        yield
    finally:
        log.removeFilter(keep_record)


CONFIG_FILES = ("config.json", ADAPTER_CONFIG)
"""Other files of a folder that affect the model's outputs."""
_CONFIG_ORIGINS = ("_name_or_path", "base_model_name_or_path", "transformers_version")
HASH_THREADS = 8

BASE_CHANGED_MESSAGE = (
    "its adapters were trained on other weights than the recipe names now; "
    "restore the old model.path, model.config or model.init, or start a new run"
)


def weights_fingerprint(model: ModelConfig, seed: int, half_precision_init: bool = False) -> str:
    """Return a hash of the initial weights of `model`: of its files, or of config and seed for random weights.

    New adapters, freezing and precision are not included. Random weights depend on torch's generator and on
    transformers' order of initialization, so their versions are included too. The seed counts only there: the files of
    a policy hold all of its weights, and a head missing from them never serves as a reference. `half_precision_init`:
    the weights are drawn in 16 bits, as under ZeRO-3, which gives other numbers; but those of a model to quantize are
    drawn before it is sharded, as at the other stages. Every byte of the files is read once;
    later starts take the files' hashes from the cache. Raises RecipeError for missing weights.
    """
    if model.path is not None:
        base = _hash_model(model.path, model.trust_remote_code, model.revision)
    else:
        libraries = [".".join(version(name).split(".")[:2]) for name in ("torch", "transformers")]
        coarse = ["coarse"] if half_precision_init and model.quantize is None else []
        base = json.dumps([model.config, seed, libraries, *coarse], sort_keys=True, default=str)
    start = "" if model.init is None else _hash_files(find_init_files(model.init))
    return hashlib.sha256(f"{base}\n{start}".encode()).hexdigest()


def config_fingerprint(name_or_path: str, revision: str | None = None) -> str | None:
    """Return a hash of the config of a folder, of a Hub id's cached files, or of an adapter's base model.

    None for a Hub id that is not in the cache.
    """
    folder = Path(name_or_path).expanduser()
    if (adapter := read_adapter(name_or_path)) is not None:
        return config_fingerprint(adapter.base_model, adapter.revision)
    if not folder.is_dir():
        found = find_cached_config(name_or_path, revision)
        return None if found is None else _hash_config(found)
    return _hash_config(folder / CONFIG_FILES[0]) if (folder / CONFIG_FILES[0]).is_file() else None


def find_cached_config(name: str, revision: str | None = None) -> Path | None:
    """Return config.json of a Hub id in the cache; the name of its folder is the commit. None where it is not cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_FILES[0], revision=revision)
    except HFValidationError:  # no Hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _hash_config(file: Path) -> str:
    """Return a hash of a config without the path and the library version that it was written with."""
    try:
        values = parse_json(read_limited(file, MAX_JSON_BYTES))
    except (OSError, ValueError):  # refused by its reader, which names the line
        return _hash_file(file)
    if not isinstance(values, dict):
        return _hash_file(file)
    values = {name: value for name, value in values.items() if name not in _CONFIG_ORIGINS}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _hash_model(name_or_path: str, with_code: bool, revision: str | None = None) -> str:
    """Return the hashes of a folder's files, or the commit of a Hub id's revision."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return f"{name_or_path} {_get_hub_commit(name_or_path, revision)}"
    weights = next((found for pattern in WEIGHT_PATTERNS if (found := [*folder.glob(pattern)])), [])
    own = _hash_files([*weights, *(folder.glob("*.py") if with_code else ())])
    own += "".join(f"\n{name} {_hash_config(folder / name)}" for name in CONFIG_FILES if (folder / name).is_file())
    # The outputs of an adapter depend on its base model too.
    adapter = read_adapter(name_or_path)
    return own if adapter is None else f"{own}\n{_hash_model(adapter.base_model, with_code, adapter.revision)}"


def _get_hub_commit(name: str, revision: str | None) -> str:
    """Return the commit of a Hub repository's revision, which identifies all its files; in offline mode the cached one."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json"])).name
    except Exception as error:  # huggingface_hub's own errors, and those of the network
        reason = " ".join(str(error).split())[:200]
        problem = f"'{name}' is neither a folder nor a reachable hub id ({type(error).__name__}: {reason})"
        raise RecipeError(Fault("model.path", problem, "restore the model, or write its new path")) from error


def _hash_files(files: Sequence[Path]) -> str:
    # The order of a folder's listing differs between file systems.
    ordered = sorted(files)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        hashes = [*threads.map(_hash_file, ordered)]
    return "\n".join(f"{file.name} {found}" for file, found in zip(ordered, hashes, strict=True))


def _hash_file(file: Path) -> str:
    return _cached_digest(file, tuple(file_state(file)))


@cache
def _cached_digest(file: Path, file_stat: tuple[int, ...]) -> str:
    """Return the digest of a file. Size, inode and times are arguments, so that a rewritten file is read again."""
    return file_digest(file)
