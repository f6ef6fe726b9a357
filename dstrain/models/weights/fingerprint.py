"""What weights are, in one word: two models with the same fingerprint answer alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path

from dstrain.cache_dir import file_digest, file_state
from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.folder.adapter_config import read_adapter
from dstrain.models.weights.files import find_init_files

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
"""A folder's weights; the second kind counts where there is none of the first."""
CONFIG_FILES = ("config.json", "adapter_config.json")
"""Other files of a folder that decide what its model answers."""
HASH_THREADS = 8

BASE_CHANGED_MESSAGE = (
    "its adapters were trained on other weights than those the recipe names now; "
    "put the old ones back under model.path, model.config or model.init, or start a new run"
)


def weights_fingerprint(model: ModelConfig, seed: int, half_precision_init: bool = False) -> str:
    """A hash of the weights that `model` starts from: of its files, or of config and seed where they are drawn.

    Nothing that lies on top of them (adapters, frozen parts, precision) is counted. Drawn weights hang on the random
    numbers of torch and on the order in which transformers draws them, so their versions count too. The seed counts
    only there: a policy's files hold all of its weights, and a head that files lack is drawn to be trained, never to
    be asked. `coarse`: they are drawn in 16 bits, as DeepSpeed does in shards, which gives other numbers. Every byte of
    the files is read once; later starts find the files' hashes in the cache. Raises RecipeError where the weights are not there.
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


def _hash_model(name_or_path: str, with_code: bool) -> str:
    """Hashes of what lies in a folder, or the revision that a hub name stands for today."""
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return f"{name_or_path} {_get_hub_revision(name_or_path)}"
    weights = next((found for pattern in WEIGHT_PATTERNS if (found := [*folder.glob(pattern)])), [])
    patterns = (*CONFIG_FILES, *(("*.py",) if with_code else ()))
    own = _hash_files([*weights, *(file for pattern in patterns for file in folder.glob(pattern))])
    adapter = read_adapter(name_or_path)
    return own if adapter is None else f"{own}\n{_hash_model(adapter.base_model, with_code)}"


def _get_hub_revision(name: str) -> str:
    """The commit of a hub repository, which stands for all its bytes; in offline mode the one in the cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json"])).name
    except Exception as error:  # its own errors, and those of the network beneath
        reason = " ".join(str(error).split())[:200]
        problem = f"'{name}' is neither a folder nor a hub id that can be reached ({type(error).__name__}: {reason})"
        raise RecipeError(Fault("model.path", problem, "put the model back, or say where it is now")) from error


def _hash_files(files: Sequence[Path]) -> str:
    ordered = sorted(files)
    with ThreadPoolExecutor(HASH_THREADS) as threads:
        hashes = [*threads.map(_hash_file, ordered)]
    return "\n".join(f"{file.name} {found}" for file, found in zip(ordered, hashes, strict=True))


def _hash_file(file: Path) -> str:
    return _cached_digest(file, tuple(file_state(file)))


@cache
def _cached_digest(file: Path, file_stat: tuple[int, ...]) -> str:
    """Its size, number and times are part of the question, so that a file written anew is read anew."""
    return file_digest(file)
