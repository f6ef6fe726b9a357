"""Worker functions of the tests of the best checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dstrain.batch import Progress
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.trained_model import ModelSelector, load_saved_model
from dstrain.ds_config import Device
from dstrain.errors import CheckpointError
from dstrain.launch.topology import Worker
from dstrain.training.build_run import build_run, with_frozen_outputs
from dstrain.training.evaluate import Evaluation
from dstrain.training.plan import make_plan
from dstrain.training.run import Run
from dstrain.training.start import ResumeOptions
from tests.parity.cases import weights, world
from tests.resume.cases import run


def sums(found: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> hash of the values as float64."""
    exact = {name: np.asarray(value.double() if isinstance(value, torch.Tensor) else value, dtype=np.float64)
             for name, value in found.items()}  # fmt: skip
    return {name: hashlib.sha256(value.tobytes()).hexdigest()[:16] for name, value in sorted(exact.items())}


def run_told(recipe: str, run_dir: str, told: Mapping[int, float]) -> None:
    """Train with the given metric at each evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluate", lambda self, progress: told[progress.step])
        run(recipe, run_dir)


def run_with_losses(
    recipe: str, run_dir: str, losses: Mapping[int, float], crash_at: int | None = None, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Train with the given loss at each evaluation, step -> loss."""
    evaluate, now = Run.evaluate, [0]

    def remember(self: Run, progress: Progress) -> float | None:
        now[0] = progress.step
        return evaluate(self, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "evaluate", remember)
        patch.setattr(Evaluation, "run", lambda self, engine, should_stop: {"loss": losses[now[0]]})
        return run(recipe, run_dir, sets, crash_at)


def held(folder: str, step: str, ds_config: str | None) -> dict[str, str]:
    """Return hashes of the weights that `evaluate` loads. Collective."""
    found = ModelSelector(folder=Path(folder), step=step, ds_config=ds_config).find_model()
    hold = found.build_ds_config(ds_config, world().size, Device("cpu", True))
    return sums(weights(load_saved_model(found, hold, world())))


def refusal(folder: str, step: str, ds_config: str | None) -> str:
    """Return the error with which loading the weights is refused. Collective."""
    with pytest.raises(CheckpointError) as caught:
        held(folder, step, ds_config)
    return str(caught.value)


def resumed(recipe: str, run_dir: str, resume: str, sets: Sequence[str]) -> dict[str, Any]:
    """Return step and weights of a run that resumes with `--resume`, before its first step. Collective."""
    ranks = world()
    worker = Worker(ranks.rank, ranks.rank, ranks.size, "tests", ranks.size)
    plan = make_plan(
        resolve_recipe(TrainRequest(recipe=recipe, overrides=sets)), Path(run_dir), ResumeOptions(resume), worker
    )
    made = build_run(with_frozen_outputs(plan, ranks), ranks)
    progress = made.resume()
    for sink in made.sinks:
        sink.close()
    made.run_log.close()
    return {"step": progress.step, "weights": sums(weights(made.engine.train_module.model))}  # type: ignore[attr-defined]
