"""Weights in files: which files, which names and shapes, and the values one by one when they are asked for."""

from __future__ import annotations

import json
import os.path
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    import torch

INIT_KEY = "model.init"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training scripts keep the state dict beside their optimizer's."""
ACCEPTED_FORMATS = "a .safetensors file, a .pt, .pth or .bin file with a state dict, or a folder with *.safetensors or pytorch_model*.bin"
WEIGHT_FILE_PATTERNS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin"))
"""A folder's weights in one file, and in several."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    """True for 16 bits or more; float8 means nothing without its scales."""
    read: Callable[[], torch.Tensor]
    """Its values, on the host."""


def find_init_files(name: str) -> list[Path]:
    """The files that `model.init` means. Reads only beginnings of files, and needs no torch. Raises RecipeError."""
    path = Path(name).expanduser()
    if not os.path.exists(path):  # False, where Path would raise, for a name too long
        there = f"{name!r} is neither a file nor a folder (we are in {Path.cwd()})"
        raise RecipeError(Fault(INIT_KEY, there, f"give {ACCEPTED_FORMATS}; names from the hub are for model.path"))
    files = find_weight_files(path, INIT_KEY) if path.is_dir() else [path]
    if not files or (path.is_file() and path.suffix not in (".safetensors", *PICKLE_SUFFIXES)):
        problem = "holds no weights" if path.is_dir() else f"ends in '{path.suffix}'"
        raise RecipeError(Fault(INIT_KEY, f"{name!r} {problem}", f"give {ACCEPTED_FORMATS}"))
    faults = [
        Fault(INIT_KEY, f"{file} {fault}", "fetch or save it again")
        for file in files
        if (fault := find_file_problem(file))
    ]
    if faults:
        raise RecipeError(faults)
    return files


def find_weight_files(folder: Path, key: str) -> list[Path]:
    """The files that transformers would take, safetensors first. Raises RecipeError for the recipe's `key`."""
    for one, many in WEIGHT_FILE_PATTERNS:
        files = [folder / one] if (folder / one).is_file() else read_shard_index(folder / f"{one}.index.json", key)
        files = files or sorted(folder.glob(many))
        if files:
            return files
    return []


def read_shard_index(index: Path, key: str) -> list[Path]:
    """The files that an index of shards names; none where there is no index. Raises RecipeError."""
    if not index.is_file():
        return []
    try:
        names = {*json.loads(index.read_text())["weight_map"].values()}
        files = sorted(index.parent / name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise RecipeError(Fault(key, f"{index} cannot be read ({error})", "download it again")) from None
    outside = [name for name in sorted(names) if os.path.isabs(name) or ".." in Path(name).parts]
    if outside:
        problem = f"{index} names a file outside its folder: {outside[0]!r}"
        raise RecipeError(Fault(key, problem, "download the model again from a source that you trust"))
    return files


def find_file_problem(file: Path) -> str:
    """What is wrong with a file of weights by its header and size; empty where nothing is."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return "is not there, though the index of shards names it"
    try:
        with file.open("rb"):  # safetensors says "No such file" of one that may not be read
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
    """Every tensor in the files, by name. Nothing in a file is ever run. Raises RecipeError.

    Values of safetensors, and of what torch.save wrote since its release 1.6, stay on the disk until they are read.
    """
    found: dict[str, LazyTensor] = {}
    for file in files:
        own = _open_safetensors(file) if file.suffix == ".safetensors" else _open_pickle(file)
        if twice := sorted(found.keys() & own.keys()):
            raise RecipeError(
                Fault(INIT_KEY, f"{file} and a file beside it both hold '{twice[0]}'", "name one of the files")
            )
        found |= own
    return found


def _open_safetensors(file: Path) -> dict[str, LazyTensor]:
    from safetensors import safe_open

    opened = safe_open(str(file), framework="pt")
    found = {}
    for name in opened.keys():  # noqa: SIM118  it is no dict
        part = opened.get_slice(name)
        dtype = part.get_dtype()
        is_float = dtype in ("F64", "F32", "F16", "BF16")
        found[name] = LazyTensor(tuple(part.get_shape()), dtype, is_float, partial(opened.get_tensor, name))
    return found


def _open_pickle(file: Path) -> dict[str, LazyTensor]:
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # whatever a file of any bytes makes of it
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
    words = str(error)
    asked = re.search(r"GLOBAL (\S+)", words)
    if asked:
        return Fault(
            INIT_KEY,
            f"{file} holds more than tensors: to read it, '{asked[1]}' would have to be run, and nothing of it was run",
            "where you trust the file, save its weights alone: torch.save(model.state_dict(), FILE), or as safetensors",
        )
    lines = words.rpartition("WeightsUnpickler error: ")[2].strip().splitlines() or ["it ends too early"]
    return Fault(INIT_KEY, f"{file} cannot be read ({type(error).__name__}: {lines[0]})", f"give {ACCEPTED_FORMATS}")


def _find_state_dict(loaded: Any, file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors by name, bare or under one of WRAPPERS, which may lie in one another."""
    import torch

    place: Any = loaded
    while isinstance(place, Mapping):
        inner = [place[key] for key in STATE_DICT_KEYS if isinstance(place.get(key), Mapping) and place[key]]
        if not inner:
            break
        place = inner[0]
    tensors = {}
    if isinstance(place, Mapping):
        tensors = {name: value for name, value in place.items() if isinstance(value, torch.Tensor)}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        held = (
            f"a dict of {', '.join(map(str, [*loaded][:8]))}" if isinstance(loaded, Mapping) else type(loaded).__name__
        )
        mend = f"give a state dict, bare or under one of the keys {', '.join(STATE_DICT_KEYS)}"
        raise RecipeError(Fault(INIT_KEY, f"{file} holds no state dict but {held}", mend))
    return tensors
