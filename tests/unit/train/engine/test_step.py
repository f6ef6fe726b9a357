"""Weight of a step, by which its loss is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import OptimConfig, RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import RunError
from dstrain.models.params.groups import build_param_groups
from dstrain.tasks import make_task
from dstrain.tasks.rm import RewardModel
from dstrain.train.build_model import build_train_module
from dstrain.train.engine.torch import TorchEngine


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_that_weighs_nothing_names_its_samples(weight: float, tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(RewardModel.tiny(tmp_path)))
    objective = build_train_module(task)
    optim = OptimConfig(name="sgd")
    engine = TorchEngine(objective, build_param_groups(objective.model, optim), optim, torch.device("cpu"))
    examples: Any = task.examples("train")
    batches = [replace(make_batch(examples, task.collate, [at], 0), weight=weight) for at in (5, 2)]
    before = [parameter.clone() for parameter in objective.parameters()]
    with pytest.raises(RunError, match=r"samples of one step, 2, 5, have a total weight of .*leave out samples"):
        engine.step([*batches, make_batch(examples, task.collate, [7], 0).as_filler()], 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, objective.parameters(), strict=True))
