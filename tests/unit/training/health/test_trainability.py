"""A run whose steps were all left out has not trained, and does not say that it finished."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dstrain.batch import Progress, StepResult
from dstrain.errors import NonFiniteError
from dstrain.training.health.trainability import NonFiniteGuard

LEFT_OUT = {"applied": False, "loss_is_finite": False, "suspects": (3, 4)}
SCALING = {"applied": False, "loss_is_finite": True}


def after(results: list[dict[str, Any]], before: int = 0, fp16: bool = False, policy: str = "stop") -> NonFiniteGuard:
    guard, progress = NonFiniteGuard(policy, fp16, lambda name, **_: None), Progress(before)
    for result in results:
        progress = progress.advance(2)
        guard.check_step(StepResult(loss=torch.tensor(0.0), weight=1.0, **result), progress)
    guard.check_run(progress)
    return guard


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_changed_nothing_is_an_error(count: int) -> None:
    with pytest.raises(NonFiniteError, match=rf"none of the {count} steps changed the weights.*nan in the weights"):
        after([LEFT_OUT] * count)


def test_a_run_whose_steps_were_all_left_out_is_refused() -> None:
    with pytest.raises(NonFiniteError, match="none of the 9 steps"):
        after([LEFT_OUT] * 9, policy="skip")


def test_a_run_that_only_searched_its_loss_scale_is_refused() -> None:
    with pytest.raises(
        NonFiniteError, match=r"none of the 5 steps.*searching for its loss scale; train for more steps"
    ):
        after([SCALING] * 5, fp16=True)


def test_one_step_is_enough_and_others_are_counted() -> None:
    assert after([LEFT_OUT, {}, LEFT_OUT]).num_skipped == 2
    assert after([{}, {}]).num_skipped == 0
    assert after([SCALING, {}], fp16=True).num_skipped == 0


def test_the_end_of_a_run_that_was_resumed_is_as_without_the_stop() -> None:
    assert after([LEFT_OUT], before=7).num_skipped == 1
