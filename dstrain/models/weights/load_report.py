"""Load report: missing, unexpected and mismatched keys, found before any value is read."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.folder.adapter_config import resolve_base_model
from dstrain.models.weights.files import find_weight_files, open_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

QUANTIZED_DTYPE = re.compile(r"(F8|I8|U8|I4|F4|float8|int8|uint8)\w*")
"""Dtypes of quantized values, which need scales."""


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

    transformers itself renames and compares the keys, on meta tensors. None for a Hub id, for quantized weights, and
    where the class cannot be loaded that way: then the load itself reports. Raises RecipeError for unreadable files.
    """
    folder = Path(resolve_base_model(model).path or "").expanduser()
    if model.path is None or not folder.is_dir() or getattr(meta_model.config, "quantization_config", None) is not None:
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
    return _to_load_report(info, _score_head_keys(folder))


def _read_meta_state_dict(folder: Path) -> dict[str, Any]:
    """Return the keys and shapes of a folder's weights as meta tensors. Raises RecipeError for quantized ones."""
    import torch

    try:
        files = [file for file in find_weight_files(folder, "model.path") if file.name not in SCORE_HEAD_FILES]
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


SCORE_HEAD_FILES = ("score.safetensors",)
"""Head files next to a base model. Named here too, because `dstrain.models.reward_model` imports torch."""


def _score_head_keys(folder: Path) -> set[str]:
    return {name for file in SCORE_HEAD_FILES if (folder / file).is_file() for name in open_tensors([folder / file])}


def _to_load_report(info: Mapping[str, Any], head_keys: Collection[str]) -> LoadReport:
    return LoadReport(
        missing=tuple(sorted({*info["missing_keys"]} - {*head_keys})),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(sorted((name, tuple(there), tuple(here)) for name, there, here in info["mismatched_keys"])),
    )


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
