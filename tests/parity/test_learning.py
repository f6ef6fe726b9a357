"""What should learn and does not is named, at every stage."""

from __future__ import annotations

import pytest

from tests.workers import WorkerError, Workers

LOOK = "tests.parity.learning_cases:look"
ABOUT = {"without_gradient": ["idle.weight", "idle.bias"], "not_moved": ["nought.weight", "nought.bias"]}


@pytest.mark.parametrize("kind", ["torch", "zero0", "zero1", "zero2", "zero3", "zero2_offload"])
def test_what_does_not_learn_is_named(kind: str, one: Workers, two: Workers) -> None:
    for told in (one if kind == "torch" else two)(LOOK, kind=kind):
        assert told == [("parameters_without_update", ABOUT)]


def test_the_look_waits_for_steps_that_could_move_something(two: Workers) -> None:
    assert two(LOOK, kind="zero2", rates=(0.0, 0.1, 0.0, 0.1)) == [[], []]
    assert two(LOOK, kind="zero2", rates=(0.0, 0.1, 0.0, 0.1, 0.1)) == [[("parameters_without_update", ABOUT)]] * 2


def test_where_nothing_moves_the_run_ends(one: Workers) -> None:
    with pytest.raises(WorkerError, match=r"none of the 6 trainable parameters changed in the first 3 steps"):
        one(LOOK, kind="torch", rates=(1e-30,) * 3)


@pytest.mark.parametrize(
    ("kind", "unused_in"),
    # Stage 3 gathers weights in the forward pass: ranks that use others wait for each other.
    [(kind, place) for kind in ("zero1", "zero2", "zero3") for place in ("second", "later", "rank")][:-1],
)
def test_zero_refuses_micro_batches_without_the_gradient_of_a_weight(kind: str, unused_in: str, two: Workers) -> None:
    with pytest.raises(WorkerError, match=r"trained parameters got a gradient in some micro-batches .*: used\.weight"):
        two(LOOK, kind=kind, unused_in=unused_in)


@pytest.mark.parametrize("unused_in", ["second", "rank", "later"])
def test_stage_0_takes_micro_batches_without_the_gradient_of_a_weight(unused_in: str, two: Workers) -> None:
    found = two(LOOK, kind="zero0", unused_in=unused_in)
    assert found == [[("parameters_without_update", {**ABOUT, "not_moved": []})]] * 2
