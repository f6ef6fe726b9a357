"""Steps with a limit of tokens are the same steps, whatever number of passes each of them takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cells import SLOW
from tests.parity.test_step import SGD, distance
from tests.workers import Workers

CASE = "tests.parity.cases:steps_of_tokens"
LIMITS = [10**6, 1, 300, 200]
"""One pass, a pass for each sample, and two between them."""
SMALL_STEPS = {"optim": SGD["optim"] | {"lr": 0.5}}
"""So that rounding does not grow from step to step."""


@pytest.fixture(scope="module")
def definition(one: Workers) -> dict[str, Any]:
    """Plain PyTorch, with all samples of a step in one pass."""
    found: dict[str, Any] = one(CASE, task="rm", kind="torch", limits=[10**6] * len(LIMITS), changes=SMALL_STEPS)[0]
    return found


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for sums, expected in zip(found["sums"], wanted["sums"], strict=True):
        assert sums == pytest.approx(expected, rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
    assert distance(found, wanted) <= 1e-6


@pytest.mark.parametrize(
    "kind", ["torch", SLOW("zero0"), SLOW("zero1"), "zero2", "zero3", "zero2_offload", SLOW("zero3_offload")]
)
def test_one_process_takes_as_many_passes_as_the_tokens_need(
    kind: str, one: Workers, definition: dict[str, Any]
) -> None:
    (found,) = one(CASE, task="rm", kind=kind, limits=LIMITS, changes=SMALL_STEPS)
    assert found["passes"][:2] == [1, 9]
    assert 1 < found["passes"][2] < found["passes"][3] < 9
    check(found, definition)


@pytest.mark.parametrize("kind", ["zero0", "zero1", "zero2", "zero3"])
def test_two_processes_take_the_same_number_of_passes(kind: str, two: Workers, definition: dict[str, Any]) -> None:
    found = two(CASE, task="rm", kind=kind, limits=LIMITS, changes=SMALL_STEPS)
    assert found[0]["passes"] == found[1]["passes"]
    assert found[0]["passes"][:2] == [1, 5], "the last pass of one process is a filler"
    for of_rank in found:
        check(of_rank, definition)


@pytest.mark.parametrize("kind", [SLOW("zero1"), "zero2", "zero3", SLOW("zero2_offload")])
def test_in_bf16_the_passes_add_up_as_in_one(kind: str, one: Workers) -> None:
    """Gradients of several passes are summed in fp32: their number moves them by the rounding of each pass only."""
    whole, split = (
        one(CASE, task="rm", kind=kind, limits=limits, changes=SMALL_STEPS, precision="bf16")[0]
        for limits in ([10**6] * 2, [10**6, 1])
    )
    assert split["passes"] == [1, 9]
    assert split["norms"] == pytest.approx(whole["norms"], rel=2e-2)
    assert distance(split, whole) <= 2e-2
