"""Models built without values, for weights that a checkpoint replaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.tasks import Task

if TYPE_CHECKING:
    import torch


def build_uninitialized(task: Task, checkpoint: Path) -> torch.nn.Module | None:
    """Build the model with uninitialized weights, so that memory holds one copy; None if it would
    differ.

    It differs from the model built from its base if the checkpoint has two values for tied weights
    (transformers unties weights when it reads two different tensors), if the family loads some
    weights in fp32, or if the base is quantized.
    """
    from dstrain.models.weights.meta_init import materialize, meta_parameters
    from dstrain.train.build_model import build_model_without_init

    with meta_parameters():
        model = build_model_without_init(task)
    keeps_fp32 = any(getattr(model, f"_keep_in_fp32_modules{which}", None) for which in ("", "_strict"))
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if has_tie_conflict(model, checkpoint) or (keeps_fp32 and task.recipe.model.dtype) or quantized:
        return None
    # Uninitialized: every value is read from the checkpoint.
    materialize(model)
    return model


def has_tie_conflict(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Return True if the checkpoint has two values for names that are one tensor in the model."""
    from dstrain.train.state.files import CheckpointReader

    tensors = model.state_dict(keep_vars=True)
    # Tied names are one tensor in the model, so two stored values have one id.
    stored = [id(tensors[name]) for name in CheckpointReader(checkpoint).shapes if name in tensors]
    return len(stored) != len({*stored})
