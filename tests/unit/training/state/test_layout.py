"""What a process holds of a run's state."""

from __future__ import annotations

import pytest
import torch

from dstrain.config.schema import OptimConfig
from dstrain.models.params import ParamGroup
from dstrain.training.engine.optimizers import make_optimizer
from dstrain.training.state.layout import ParamRange, StateSlice


@pytest.mark.parametrize(
    ("name", "kept"), [("adamw", {"exp_avg", "exp_avg_sq"}), ("lion", {"exp_avg"}), ("sgd", set())]
)
@pytest.mark.parametrize("shape", [(1000,), (40, 25), ()])
def test_an_optimizer_makes_what_it_keeps_without_learning(name: str, kept: set[str], shape: tuple[int, ...]) -> None:
    learns, beside = (torch.nn.Parameter(torch.ones(size)) for size in (shape, (7,)))
    optimizer = make_optimizer(
        [ParamGroup([learns, beside], 1.0, 0.1)], OptimConfig(name=name), None, torch.device("cpu")
    )
    groups = optimizer.param_groups
    part = StateSlice(learns, [ParamRange("weight", 0, learns.numel(), 0)], True, optimizer, groups[0])
    part.init_optimizer_state()
    assert {key: value.shape for key, value in part.optimizer_state.items() if key != "step"} == dict.fromkeys(
        kept, learns.shape
    )
    assert all(not value.any() for key, value in part.optimizer_state.items() if key != "step")
    assert optimizer.param_groups is groups
    assert set(optimizer.state) <= {learns}, "nothing of what it stepped on stays"
    assert learns.grad is None
    assert torch.equal(learns, torch.ones(shape))
