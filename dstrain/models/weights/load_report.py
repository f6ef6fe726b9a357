"""Whether the files of a model hold what its class needs: names and shapes are compared before any value is read."""

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
"""Types of values that mean nothing without their scales."""


@dataclass(frozen=True)
class LoadReport:
    """What transformers finds when it loads files into a class."""

    missing: tuple[str, ...]
    """The model's that the files lack: they are drawn."""
    unexpected: tuple[str, ...]
    """The files' that the model has no place for: they are left out."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, shape in the files, shape in the model)."""


def build_load_report(meta_model: PreTrainedModel, model: ModelConfig) -> LoadReport | None:
    """What loading `model` into the class of `bones` (a skeleton) would find; no value is read.

    transformers' own renaming decides, run on tensors without memory. None for a hub id, for quantized weights, and where the
    class cannot be loaded that way: then loading itself tells. Raises RecipeError for files that cannot be read.
    """
    folder = Path(resolve_base_model(model).path or "").expanduser()
    if model.path is None or not folder.is_dir() or getattr(meta_model.config, "quantization_config", None) is not None:
        return None
    stored = _read_meta_state_dict(folder)
    try:
        with load_report_disabled(), _progress_bar_disabled():
            _, info = type(meta_model).from_pretrained(
                None, config=meta_model.config, state_dict=stored, device_map={"": "meta"}, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception:  # code that came with the model, or a family that draws on values while it loads
        return None
    return _to_load_report(info, _score_head_keys(folder))


def _read_meta_state_dict(folder: Path) -> dict[str, Any]:
    import torch

    try:
        found = open_tensors(
            [file for file in find_weight_files(folder, "model.path") if file.name not in SCORE_HEAD_FILES]
        )
    except RecipeError as error:
        raise RecipeError([replace(fault, where="model.path") for fault in error.faults]) from None
    odd = [name for name, tensor in found.items() if len(tensor.shape) == 2 and QUANTIZED_DTYPE.fullmatch(tensor.dtype)]
    if odd:
        problem = (
            f"'{odd[0]}' in {folder} is stored as {found[odd[0]].dtype}, and its config.json has no quantization_config"
        )
        raise RecipeError(Fault("model.path", problem, "give weights in 16 or 32 bits"))
    return {name: torch.empty(tensor.shape, device="meta") for name, tensor in found.items()}


SCORE_HEAD_FILES = ("score.safetensors",)
"""Files of a head that lies beside a base model (`dstrain.models.reward_model`)."""


def _score_head_keys(folder: Path) -> set[str]:
    return {name for file in SCORE_HEAD_FILES if (folder / file).is_file() for name in open_tensors([folder / file])}


def _to_load_report(info: Mapping[str, Any], head_keys: Collection[str]) -> LoadReport:
    return LoadReport(
        missing=tuple(sorted({*info["missing_keys"]} - {*head_keys})),
        unexpected=tuple(sorted(info["unexpected_keys"])),
        mismatched=tuple(sorted((name, tuple(there), tuple(here)) for name, there, here in info["mismatched_keys"])),
    )


@contextmanager
def _progress_bar_disabled() -> Iterator[None]:
    """Inside, transformers shows no progress."""
    from transformers.utils import logging as settings

    shown = settings.is_progress_bar_enabled()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            settings.enable_progress_bar()


@contextmanager
def load_report_disabled() -> Iterator[None]:
    """Inside, transformers does not print its LOAD REPORT: `check_fit` says what matters of it."""
    log = logging.getLogger("transformers.modeling_utils")

    def keep_record(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    log.addFilter(keep_record)
    try:
        yield
    finally:
        log.removeFilter(keep_record)


def shape_fault(mismatch: tuple[str, tuple[int, ...], tuple[int, ...]], heads: Sequence[str]) -> Fault:
    name, there, here = mismatch
    problem = f"'{name}' is {there} in its files and {here} in the model that its config.json describes"
    mend = "give the config.json that belongs to these weights"
    if is_head_key(name, heads):
        problem, mend = (
            f"'{name}' is {there} in its files, and the task needs {here}",
            "name a model with a head of one score",
        )
    return Fault("model.path", problem, mend)


def is_head_key(name: str, heads: Sequence[str]) -> bool:
    return any(part in heads for part in name.split("."))
