"""Hashes of initial weights, for cache keys and resume checks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

from dstrain.cache import file_digest, file_state
from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.folder.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from dstrain.models.folder.adapter_config import read_adapter
from dstrain.models.weights.files import WEIGHT_PATTERNS, find_init_files

CONFIG_FILES = ("config.json", ADAPTER_CONFIG)
"""Other files of a folder that affect the model's outputs."""
_CONFIG_ORIGINS = ("_name_or_path", "base_model_name_or_path", "transformers_version")
HASH_THREADS = 8

BASE_CHANGED_MESSAGE = (
    "its adapters were trained on other weights than those that the recipe names now; "
    "restore the old model.path, model.config or model.init, or start a new run"
)


def weights_fingerprint(model: ModelConfig, seed: int, half_precision_init: bool = False) -> str:
    """Return a hash of the initial weights of `model`: of its files, or of config and seed for random weights.

    New adapters, freezing and precision are not included. Random weights depend on torch's generator and on
    transformers' order of initialization, so their versions are included too. The seed counts only there: the files of
    a policy hold all of its weights, and a head missing from them never serves as a reference. `half_precision_init`:
    the weights are drawn in 16 bits, as under ZeRO-3, which gives other numbers. Every byte of the files is read once;
    later starts take the files' hashes from the cache. Raises RecipeError for missing weights.
    """
    if model.path is not None:
        base = _hash_model(model.path, model.trust_remote_code)
    else:
        libraries = [".".join(version(name).split(".")[:2]) for name in ("torch", "transformers")]
        base = json.dumps(
            [model.config, seed, libraries, *(["coarse"] if half_precision_init else [])], sort_keys=True, default=str
        )
    start = "" if model.init is None else _hash_files(find_init_files(model.init))
    return hashlib.sha256(f"{base}\n{start}".encode()).hexdigest()


def config_fingerprint(name_or_path: str) -> str | None:
    """Return a hash of a folder's config, or of that of an adapter's base model; None for a Hub id."""
    folder = Path(name_or_path).expanduser()
    if (adapter := read_adapter(name_or_path)) is not None:
        return config_fingerprint(adapter.base_model)
    return _hash_config(folder / CONFIG_FILES[0]) if (folder / CONFIG_FILES[0]).is_file() else None


def _hash_config(file: Path) -> str:
    """Return a hash of a config without the path and the library version that it was written with."""
    try:
        values = json.loads(file.read_bytes())
    except ValueError:  # refused by its reader, which names the line
        return _hash_file(file)
    values = {name: value for name, value in values.items() if name not in _CONFIG_ORIGINS}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _hash_model(name_or_path: str, with_code: bool) -> str:
    """Return the hashes of a folder's files, or the current revision of a Hub id."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return f"{name_or_path} {_get_hub_revision(name_or_path)}"
    weights = next((found for pattern in WEIGHT_PATTERNS if (found := [*folder.glob(pattern)])), [])
    own = _hash_files([*weights, *(folder.glob("*.py") if with_code else ())])
    own += "".join(f"\n{name} {_hash_config(folder / name)}" for name in CONFIG_FILES if (folder / name).is_file())
    # The outputs of an adapter depend on its base model too.
    adapter = read_adapter(name_or_path)
    return own if adapter is None else f"{own}\n{_hash_model(adapter.base_model, with_code)}"


def _get_hub_revision(name: str) -> str:
    """Return the commit of a Hub repository, which identifies all its files; in offline mode the cached one."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json"])).name
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
