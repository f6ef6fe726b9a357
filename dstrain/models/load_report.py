"""Differences between a model and its weight files, found without reading values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.folder import SCORE_HEAD_FILE, resolve_base_model
from dstrain.models.weights import (
    QUANTIZED_DTYPE,
    disable_transformers_logging,
    find_weight_files,
    load_report_disabled,
    open_tensors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadReport:
    """Differences between a model's state-dict keys and those of its files."""

    missing: tuple[str, ...]
    """Keys of the model that are not in the files: these weights are newly initialized."""
    unexpected: tuple[str, ...]
    """Keys of the files that are not in the model: these weights are ignored."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, shape in the files, shape in the model)."""


def build_load_report(meta_model: PreTrainedModel, model: ModelConfig) -> LoadReport | None:
    """Return the report of loading `model` into the class of `meta_model`, without reading values.

    transformers itself renames and compares the keys, on meta tensors. None for a Hub id, and where the
    class cannot be loaded that way: then the load itself reports. Raises RecipeError for unreadable files.
    """
    folder = Path(resolve_base_model(model).path or "").expanduser()
    if model.path is None or not folder.is_dir():
        return None
    stored = _read_meta_state_dict(folder)
    try:
        with load_report_disabled(), disable_transformers_logging(progress_bar=True):
            _, info = type(meta_model).from_pretrained(
                None, config=meta_model.config, state_dict=stored, device_map={"": "meta"}, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception:  # custom code, or a family that needs real values while loading
        return None
    head = folder / SCORE_HEAD_FILE
    head_keys = {*open_tensors([head])} if head.is_file() else set()
    return LoadReport(
        missing=tuple(sorted({*info["missing_keys"]} - head_keys)),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(sorted((name, tuple(there), tuple(here)) for name, there, here in info["mismatched_keys"])),
    )


def _read_meta_state_dict(folder: Path) -> dict[str, Any]:
    """Return the keys and shapes of a folder's weights, dequantized, as meta tensors.

    Raises RecipeError for quantized weights that cannot be dequantized.
    """
    import torch

    from dstrain.models.dequantize import open_dequantized, read_quantization

    try:
        if read_quantization(folder) is not None:
            tensors = dict(open_dequantized(folder, torch.float32).values())
        else:
            files = [file for file in find_weight_files(folder, "model.path") if file.name != SCORE_HEAD_FILE]
            tensors = open_tensors(files)
    except RecipeError as error:
        raise RecipeError([replace(fault, where="model.path") for fault in error.faults]) from None
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and QUANTIZED_DTYPE.fullmatch(tensor.dtype):
            problem = (
                f"'{name}' in {folder} is stored as {tensor.dtype}, but its config.json has no quantization_config"
            )
            raise RecipeError(Fault("model.path", problem, "give weights in 16 or 32 bits"))
    return {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}


def shape_fault(mismatch: tuple[str, tuple[int, ...], tuple[int, ...]], heads: Sequence[str]) -> Fault:
    """Return the fault of a shape mismatch. `heads`: names of modules that may be new."""
    name, file_shape, model_shape = mismatch
    problem = f"'{name}' is {file_shape} in its files and {model_shape} in the model that its config.json describes"
    fix = "give the config.json that belongs to these weights"
    if is_head_key(name, heads):
        problem = f"'{name}' is {file_shape} in its files, but the task needs {model_shape}"
        fix = "use a model whose head has one score"
    return Fault("model.path", problem, fix)


def is_head_key(name: str, heads: Sequence[str]) -> bool:
    """Return True for a key inside one of the modules `heads`."""
    return any(part in heads for part in name.split("."))
