"""dstrain export: a folder that transformers loads, proven on a probe batch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dstrain.commands.trained import EXPORT_RECIPE, Trained, load_trained
from dstrain.config import show_recipe
from dstrain.errors import CheckpointError, TaskError, UsageError

PROBES = 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Proof:
    """What the reloaded model was compared by."""

    step: int | None
    dtype: str
    difference: float
    """Largest difference of an output, relative to outputs above 1."""


def export_model(run: Path, step: str, to: Path, sets: Sequence[str] = ()) -> Proof:
    """Write the folder beside its place, reload it, compare, and only then give it its name."""
    if to.exists() and not to.is_dir():
        raise UsageError(f"--to {to}: is a file; choose another name")
    if to.exists() and any(to.iterdir()):
        raise UsageError(f"--to {to}: exists and is not empty; choose another folder")
    trained = load_trained(run, step, sets)
    if not hasattr(trained.model, "save_pretrained"):
        kind = type(trained.model).__name__
        raise TaskError(
            f"task {trained.task.recipe.task}: its model ({kind}) is none of transformers', so there is no such folder"
        )
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        trained.model.save_pretrained(str(partial))
        trained.task.save_extras(partial)
        (partial / EXPORT_RECIPE).write_text(show_recipe(trained.task.recipe), encoding="utf-8")
        proof = _prove(trained, partial)
        if to.exists():
            to.rmdir()
        os.rename(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return proof


@torch.no_grad()
def _prove(trained: Trained, folder: Path) -> Proof:
    """Raises CheckpointError where the reloaded model says something else."""
    again = trained.task.reload(folder).eval()
    dtype = next(trained.model.parameters()).dtype
    examples = trained.task.examples("eval") or trained.task.examples("train") or []
    if not examples:
        raise UsageError("there is no sample to probe the export with; give some with --set data.eval=FILE")
    worst = 0.0
    for index in range(min(PROBES, len(examples))):
        batch = trained.task.collate([examples[index]])
        ours, theirs = (trained.task.outputs(model, batch).double() for model in (trained.model, again))
        worst = max(worst, float(((ours - theirs).abs() / ours.abs().clamp(min=1)).max()))
    if not worst <= TOLERANCE[dtype]:
        raise CheckpointError(
            f"the exported model was reloaded and its outputs differ by {worst:.2g}; nothing was written"
        )
    return Proof(trained.step, str(dtype).removeprefix("torch."), worst)
