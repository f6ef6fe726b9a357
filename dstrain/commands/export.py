"""dstrain export: a folder that transformers loads, proven on a probe batch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def export_model(run: Path, step: str, to: Path, sets: Sequence[str] = (), merge: bool = False) -> Proof:
    """Write the folder beside its place, reload it, compare, and only then give it its name.

    `merge`: adapters are added to the weights they lie on, and one whole model is written.
    """
    if to.exists() and not to.is_dir():
        raise UsageError(f"--to {to}: is a file; choose another name")
    if to.exists() and any(to.iterdir()):
        raise UsageError(f"--to {to}: exists and is not empty; choose another folder")
    trained = load_trained(run, step, sets)
    _check_form(trained, merge)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        proof = _write(trained, partial, merge)
        if to.exists():
            to.rmdir()
        os.rename(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return proof


def _check_form(trained: Trained, merge: bool) -> None:
    """Raise where the model has no such folder."""
    recipe, kind = trained.task.recipe, type(trained.model).__name__
    if not hasattr(trained.model, "save_pretrained"):
        raise TaskError(f"task {recipe.task}: its model ({kind}) is none of transformers', so there is no such folder")
    if merge and recipe.model.lora is None:
        raise UsageError("--merge-lora: the run has no adapters (model.lora); leave the flag out")
    if recipe.model.lora is not None and not merge and (recipe.model.path is None or recipe.model.init is not None):
        raise UsageError(
            "its adapters lie on weights that no folder holds as they are (model.config or model.init), so that "
            "nobody could load them; add --merge-lora to write one whole model"
        )


@torch.no_grad()
def _write(trained: Trained, folder: Path, merge: bool) -> Proof:
    """Raises CheckpointError where the reloaded model says something else."""
    task, model = trained.task, trained.model
    dtype = next(model.parameters()).dtype
    examples = task.examples("eval") or task.examples("train") or []
    if not examples:
        raise UsageError("there is no sample to probe the export with; give some with --set data.eval=FILE")
    probes = [task.collate([examples[index]]) for index in range(min(PROBES, len(examples)))]
    ours = [task.outputs(model, batch).double() for batch in probes]
    whole: Any = model.merge_and_unload(safe_merge=True) if merge else model
    whole.save_pretrained(str(folder))
    task.save_extras(folder)
    (folder / EXPORT_RECIPE).write_text(show_recipe(task.exported(merge)), encoding="utf-8")
    again = task.reload(folder).eval()
    worst = 0.0
    for mine, batch in zip(ours, probes, strict=True):
        theirs = task.outputs(again, batch).double()
        worst = max(worst, float(((mine - theirs).abs() / mine.abs().clamp(min=1)).max()))
    if not worst <= TOLERANCE[dtype]:
        raise CheckpointError(
            f"the exported model was reloaded and its outputs differ by {worst:.2g}; nothing was written"
        )
    return Proof(trained.step, str(dtype).removeprefix("torch."), worst)
