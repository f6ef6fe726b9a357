"""Whether a folder has files of weights, and whole ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.adapters.folder import base_of
from dstrain.models.weights.files import damage, indexed, stored_tensors


def check_weights(model: ModelConfig, pickles: bool = True) -> None:
    """Raise RecipeError where a local folder holds no weights, or not whole ones: only beginnings of files are read.

    `pickles`: also look into pytorch_model*.bin, which needs torch.
    """
    name = base_of(model).path
    folder = Path(name).expanduser() if name else None
    if folder is None or not folder.is_dir():
        return
    try:
        os.listdir(folder)  # which glob takes for empty where it may not be read
    except OSError as error:
        problem = f"'{name}' cannot be read ({error.strerror})"
        raise RecipeError(Fault("model.path", problem, "check the permissions of the folder")) from None
    if not has_weights(folder):
        raise RecipeError(
            Fault(
                "model.path",
                f"'{name}' holds no weights",
                "put *.safetensors there, or use model.config to start anew",
            )
        )
    shards = indexed(folder / "model.safetensors.index.json", "model.path")
    faults = [
        Fault("model.path", f"{file} {fault}", _mend_of(fault))
        for file in sorted({*folder.glob("*.safetensors"), *shards})
        if (fault := damage(file))
    ]
    if faults:
        raise RecipeError(faults)
    if pickles and not any(folder.glob("*.safetensors")):
        _check_pickles(sorted(folder.glob("pytorch_model*.bin")))


def has_weights(folder: Path) -> bool:
    """Whether a local folder has files of weights; True for a name on the hub."""
    if not folder.is_dir():
        return True
    return any(path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in folder.glob(pattern))


def _mend_of(fault: str) -> str:
    if fault.startswith("cannot be read"):
        return "check the permissions of the file"
    return "download it again; `git lfs pull` where git left a pointer"


def _check_pickles(files: Sequence[Path]) -> None:
    """Raise RecipeError for a file that holds more than tensors, in the words of model.init. Values stay on the disk."""
    try:
        for file in files:
            stored_tensors([file])
    except RecipeError as error:
        raise RecipeError(Fault("model.path", fault.problem, fault.mend) for fault in error.faults) from error
