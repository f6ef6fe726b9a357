"""What should learn and does not is named, at every stage."""

from __future__ import annotations

import pytest

from tests.cells import SLOW
from tests.workers import WorkerError, Workers

LOOK = "tests.parity.learning_cases:look"
ABOUT = {"without_gradient": ["idle.weight", "idle.bias"], "not_moved": ["nought.weight", "nought.bias"]}


@pytest.mark.parametrize("kind", ["torch", "zero0", "zero1", "zero2", "zero3", "zero2_offload"])
def test_what_does_not_learn_is_named(kind: str, one: Workers, two: Workers) -> None:
    for told, _ in (one if kind == "torch" else two)(LOOK, kind=kind):
        assert told == [("parameters_without_update", ABOUT)]


def test_the_look_waits_for_steps_that_could_move_something(two: Workers) -> None:
    for told, _ in two(LOOK, kind="zero2", rates=(0.0, 0.1, 0.0, 0.1)):
        assert told == []
    for told, _ in two(LOOK, kind="zero2", rates=(0.0, 0.1, 0.0, 0.1, 0.1)):
        assert told == [("parameters_without_update", ABOUT)]


def test_where_nothing_moves_the_run_ends(one: Workers) -> None:
    with pytest.raises(WorkerError, match=r"none of the 6 trainable parameters changed in the first 3 steps"):
        one(LOOK, kind="torch", rates=(1e-30,) * 3)


@pytest.mark.parametrize(
    ("kind", "unused_in"),
    [
        ("zero1", "second"), ("zero3", "later"), ("zero2", "rank"),
        # Stages 1 and 2 are one class of DeepSpeed. At stage 3 it itself stops ranks that gather other weights.
        SLOW("zero1", "later"), SLOW("zero2", "second"), SLOW("zero2", "later"), SLOW("zero3", "second"),
        SLOW("zero1", "rank"),
    ],
)  # fmt: skip
def test_zero_refuses_micro_batches_without_the_gradient_of_a_weight(kind: str, unused_in: str, two: Workers) -> None:
    with pytest.raises(WorkerError, match=r"trained parameters got a gradient in some micro-batches .*: used\.weight"):
        two(LOOK, kind=kind, unused_in=unused_in)


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-6), ("bf16", 1e-2)])
@pytest.mark.parametrize("unused_in", ["second", "rank", "later"])
def test_stage_0_trains_weights_that_some_micro_batches_leave_out(
    unused_in: str, precision: str, rounding: float, one: Workers, two: Workers
) -> None:
    ((_, expected),) = one(LOOK, kind="torch", unused_in=unused_in)
    for told, weights in two(LOOK, kind="zero0", unused_in=unused_in, precision=precision):
        assert told == [("parameters_without_update", {**ABOUT, "not_moved": []})]
        assert weights == {name: pytest.approx(values, rel=rounding, abs=rounding) for name, values in expected.items()}
