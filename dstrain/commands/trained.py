"""A trained model on one process: from a run's checkpoint, or from an exported folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.config import read_recipe
from dstrain.errors import CheckpointError, UsageError
from dstrain.tasks import Task, make_task

if TYPE_CHECKING:
    import torch

    from dstrain.train.manifest import CheckpointInfo


EXPORT_RECIPE = "dstrain_recipe.yaml"
"""Lies in an exported folder, so that `evaluate` knows task and options."""


@dataclass(frozen=True)
class Trained:
    """A model and the task it was trained for."""

    task: Task
    model: torch.nn.Module
    step: int | None
    """Step of the checkpoint; None for an exported folder."""


def load_trained(folder: Path, step: str, sets: Sequence[str] = (), task: str | None = None) -> Trained:
    """The model in a run folder (at `step`) or an exported folder, in evaluation mode, in the precision it was trained in.

    Raises UsageError where the folder is neither.
    """
    quieten()
    if (folder / "recipe.yaml").is_file():
        return _from_run(folder, step, sets)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UsageError(f"{folder}: is neither a run folder (recipe.yaml) nor an exported model (config.json)")
    return _from_export(folder, sets, task)


def quieten() -> None:
    """No progress bars and no notes of libraries: stdout belongs to the answer."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found none


def _from_export(folder: Path, sets: Sequence[str], task: str | None) -> Trained:
    written = folder / EXPORT_RECIPE
    if task is None and not written.is_file():
        raise UsageError(f"{folder}: is an exported model; say with --task what it was trained for, e.g. --task rm")
    if not (folder / "adapter_config.json").is_file():
        own = [f"model={json.dumps({'path': str(folder.resolve())})}"]
        made = make_task(read_recipe(written if written.is_file() else None, [*own, *sets], task).config)
        made.check()
        return Trained(made, made.build_model().eval(), None)
    if not written.is_file():
        raise UsageError(f"{folder}: holds adapters and no {EXPORT_RECIPE} that says on what; export the run again")
    made = make_task(read_recipe(written, [f"model.tokenizer={json.dumps(str(folder.resolve()))}", *sets], task).config)
    return Trained(made, made.reload(folder).eval(), None)


def _from_run(folder: Path, step: str, sets: Sequence[str]) -> Trained:
    info = find_checkpoint(folder, step)
    own = []
    if (folder / "tokenizer").is_dir():
        own.append(f"model.tokenizer={json.dumps(str((folder / 'tokenizer').resolve()))}")
    if json.loads((folder / "ds_config.json").read_text()).get("bf16", {}).get("enabled"):
        own.append("model.dtype=bfloat16")
    recipe = read_recipe(folder / "recipe.yaml", [*own, *sets])
    task = make_task(recipe.config)
    model = _with_weights(task, info)
    return Trained(task, model.eval(), info.step)


def _with_weights(task: Task, info: CheckpointInfo) -> torch.nn.Module:
    """The task's model with a checkpoint's weights; where adapters learnt, on the base they learnt on."""
    from dstrain.models.fingerprint import OTHER_BASE, fingerprint
    from dstrain.train.build import build, build_bare
    from dstrain.train.reshape import whole_weights

    adapted = task.recipe.model.lora is not None
    if adapted and info.record().get("base") != fingerprint(task.recipe.model, task.recipe.seed):
        raise CheckpointError(f"{info.path}: {OTHER_BASE}")
    model = build(task) if adapted else build_bare(task)
    missing, unexpected = model.load_state_dict(whole_weights(info.path), strict=False)
    elsewhere = set(getattr(model, "all_tied_weights_keys", ()) or ())
    if adapted:
        elsewhere |= {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    missing = [name for name in missing if name not in elsewhere]
    if missing or unexpected:
        raise CheckpointError(
            f"{info.path}: lacks {', '.join(missing[:4]) or 'nothing'} and has {', '.join(unexpected[:4]) or 'nothing'} too much; "
            f"the recipe's model is not the one that was trained"
        )
    return model


def find_checkpoint(run: Path, step: str) -> CheckpointInfo:
    """The whole checkpoint `best`, `last` or of a number; `best` is the last where none was marked."""
    from dstrain.train.manifest import listed

    folder = run / "checkpoints"
    there = [info for info in listed(folder) if info.whole]
    if not there:
        raise UsageError(f"{run}: holds no whole checkpoint; `dstrain checkpoints {run}` says why")
    if step == "last" or (step == "best" and not (folder / "best").exists()):
        return there[0]
    if step != "best" and not step.isdecimal():
        raise UsageError(f"--step {step}: is neither a number nor best nor last")
    wanted = int(step) if step.isdecimal() else int((folder / "best").resolve().name.removeprefix("step-"))
    for info in there:
        if info.step == wanted:
            return info
    steps = ", ".join(str(info.step) for info in there)
    raise UsageError(f"--step {step}: there is no whole checkpoint of it; there are {steps}")
