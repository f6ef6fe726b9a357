"""What a step costs each rank of 64, 512 and 4,096: how it grows, counted in calls, not in seconds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dstrain.data.loading.loader import StepSampler, eval_micro_batches
from dstrain.data.loading.micro_batches import CostFunction, MicroBatchLimits, SampleCosts

RANKS = (64, 512, 4096)
PER_RANK = 8
LENGTHS = np.random.RandomState(0).lognormal(5.2, 0.7, 2 * PER_RANK * RANKS[-1]).clip(10, 2048).astype(np.int64)


def count_calls(function: Callable[[], Any]) -> int:
    """Return the calls of Python and C functions."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def exponent(counts: Sequence[int], sizes: Sequence[int] = RANKS) -> float:
    """Return k, where the counts grow as the k-th power of the sizes from the first to the last."""
    return math.log(counts[-1] / counts[0]) / math.log(sizes[-1] / sizes[0])


def costs_of(is_packed: bool, asked: list[int]) -> CostFunction:
    def costs(ids: np.ndarray) -> SampleCosts:
        asked.append(len(ids))
        return SampleCosts(LENGTHS[ids], is_packed=is_packed)

    return costs


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("limit", [None, 4096])
def test_the_division_of_a_step_grows_with_the_ranks_and_reads_each_length_once(
    limit: int | None, is_packed: bool
) -> None:
    counts = []
    for ranks in RANKS:
        asked: list[int] = []
        sampler = StepSampler(
            sizes=(len(LENGTHS),),
            seed=0,
            samples_per_step=PER_RANK * ranks,
            world_size=ranks,
            accumulate=None if limit else 2,
            limits=MicroBatchLimits(tokens=limit),
            costs=costs_of(is_packed, asked),
        )
        ids = sampler.step_ids(0)
        counts.append(count_calls(lambda: sampler.micro_batches(ids, 0, ranks - 1)))  # noqa: B023  # called at once
        assert asked == [PER_RANK * ranks]
        assert count_calls(lambda: sampler.step_ids(PER_RANK * ranks)) < 40, "whatever the ranks"  # noqa: B023
    assert exponent(counts) < 1.1, counts


@pytest.mark.parametrize("limit", [None, 4096])
def test_the_micro_batches_of_an_evaluation_grow_with_its_samples_not_with_the_ranks(limit: int | None) -> None:
    def calls(ranks: int, samples: int) -> int:
        asked: list[int] = []
        limits = MicroBatchLimits(samples=PER_RANK, tokens=limit)
        count = count_calls(lambda: eval_micro_batches(samples, limits, ranks, 0, costs_of(True, asked)))
        assert asked == [samples]
        return count

    samples = PER_RANK * RANKS[-1]
    assert exponent([calls(ranks, samples) for ranks in RANKS]) < 0.1
    sizes = [samples // 64, samples // 8, samples]
    assert exponent([calls(RANKS[0], size) for size in sizes], sizes) < 1.1
