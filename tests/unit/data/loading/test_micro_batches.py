"""Micro-batches keep their limits, are alike on every rank, and cost about the same at each position."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.batch import PADDED, PackingMode
from dstrain.config.schema import BatchConfig
from dstrain.data.dataset import SequenceDataset, SequenceLengths
from dstrain.data.loading.micro_batches import (
    MicroBatchLimits,
    SampleCosts,
    _balance,
    make_cost_function,
    make_limits,
    of_rank,
    split_by_tokens,
    split_evenly,
)
from dstrain.errors import RecipeError

LENGTHS = st.lists(st.integers(0, 600), min_size=1, max_size=60).map(np.array)
WORLD = st.integers(1, 5)


def hh_lengths(count: int = 256, seed: int = 0) -> np.ndarray:
    """Lengths with a long tail, as those of dialogs."""
    return np.random.RandomState(seed).lognormal(5.2, 0.7, count).clip(10, 2048).astype(np.int64)


@given(LENGTHS, WORLD, st.integers(1, 2000), st.none() | st.integers(1, 8), st.booleans())
def test_every_sample_is_in_one_micro_batch_within_the_limits(lengths, world_size, tokens, most, is_packed):
    costs = SampleCosts(lengths, is_packed=is_packed)
    chunks = split_by_tokens(costs, MicroBatchLimits(most, tokens), world_size)
    assert sorted(int(one) for chunk in chunks for one in chunk) == list(range(len(lengths)))
    assert len(chunks) % world_size == 0
    for chunk in chunks:
        assert len(chunk) <= (most or len(lengths))
        assert costs.of(chunk) <= tokens or len(chunk) == 1
    assert len({len(of_rank(chunks, world_size, rank)) for rank in range(world_size)}) == 1
    again = split_by_tokens(costs, MicroBatchLimits(most, tokens), world_size)
    assert [chunk.tolist() for chunk in again] == [chunk.tolist() for chunk in chunks]


@given(LENGTHS, WORLD, st.integers(1, 2000), st.booleans())
def test_no_pass_is_of_fillers_only(lengths, world_size, tokens, is_packed):
    chunks = split_by_tokens(SampleCosts(lengths, is_packed=is_packed), MicroBatchLimits(tokens=tokens), world_size)
    groups = [chunks[start : start + world_size] for start in range(0, len(chunks), world_size)]
    assert all(any(len(chunk) for chunk in group) for group in groups)


def test_a_padded_micro_batch_costs_its_rows_times_the_longest():
    costs = SampleCosts(np.array([10, 30, 20]), rows=2)
    assert costs.of(np.array([0, 1])) == 2 * 2 * 30
    assert costs.of(np.array([], dtype=int)) == 0
    assert SampleCosts(np.array([10, 30, 20]), is_packed=True).of(np.array([0, 1])) == 40


def test_a_pair_costs_its_prompt_once_where_prefixes_are_shared():
    lengths = SequenceLengths(np.array([[10, 14], [8, 6]]), np.array([6, 5]))
    dataset = SequenceDataset([0, 1], (2,), sequence_lengths=lambda ids: lengths)

    def tokens(packing: PackingMode) -> list[int]:
        costs = make_cost_function(dataset, packing)
        assert costs is not None
        return costs(np.arange(2)).tokens.tolist()

    assert tokens(PADDED) == [14, 8]
    assert tokens(PackingMode(is_packed=True)) == [24, 14]
    assert tokens(PackingMode(is_packed=True, shares_prefixes=True)) == [18, 9]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_compute_about_as_much_at_each_position(world_size, is_packed):
    costs = SampleCosts(hh_lengths(), is_packed=is_packed)
    chunks = split_by_tokens(costs, MicroBatchLimits(tokens=4096), world_size)
    found = np.array([costs.of(chunk) for chunk in chunks]).reshape(-1, world_size)
    slowest = found.max(1).sum() / found.mean(1).sum()
    assert slowest < (1.01 if is_packed else 1.06), found
    assert found.max(1).tolist() == sorted(found.max(1), reverse=True), "the largest in the first pass"


def test_few_passes_are_taken():
    lengths = hh_lengths()
    packed = split_by_tokens(SampleCosts(lengths, is_packed=True), MicroBatchLimits(tokens=4096), 4)
    assert len(packed) <= 4 * -(-lengths.sum() // (4 * 4096)) + 4
    padded = split_by_tokens(SampleCosts(lengths), MicroBatchLimits(tokens=4096), 4)
    assert len(padded) <= len(packed) + 8


@given(LENGTHS, WORLD, st.integers(1, 6))
def test_packed_micro_batches_without_a_limit_differ_by_one_sample(lengths, world_size, passes):
    chunks = split_evenly(len(lengths), world_size * passes, SampleCosts(lengths, is_packed=True))
    assert sorted(int(one) for chunk in chunks for one in chunk) == list(range(len(lengths)))
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == world_size * passes
    assert max(sizes) - min(sizes) <= 1


def balance_with_heap(
    tokens: list[int], count: int, most: int, larger: int = 0, limit: int | None = None
) -> list[list[int]] | None:
    """The division that checkpoints of earlier versions were trained with: one sample after another."""
    found: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, at) for at in range(count)]
    for index, size in enumerate(tokens):
        while heap and len(found[heap[0][1]]) >= most:
            if larger:
                larger -= 1
                break
            heapq.heappop(heap)
        if not heap or (limit is not None and heap[0][0] and heap[0][0] + size > limit):
            return None
        total, at = heapq.heappop(heap)
        found[at].append(index)
        if len(found[at]) <= most:
            heapq.heappush(heap, (total + size, at))
    return found


def check_division(lengths: np.ndarray, *bins: int) -> None:
    tokens = np.sort(lengths)[::-1]
    found, wanted = _balance(tokens, *bins), balance_with_heap(tokens.tolist(), *bins)
    assert (found if found is None else [chunk.tolist() for chunk in found]) == wanted


@given(LENGTHS, st.integers(1, 20))
def test_each_sample_goes_to_the_bin_with_the_fewest_tokens(lengths, count):
    check_division(lengths, count, *divmod(len(lengths), count))


@given(LENGTHS, st.integers(1, 20), st.integers(1, 8), st.integers(1, 2000))
def test_each_sample_goes_to_the_bin_with_the_fewest_tokens_up_to_the_limit(lengths, count, most, tokens):
    check_division(lengths, count, most, 0, tokens)


@pytest.mark.parametrize("count", [64, 512])
def test_a_step_of_many_ranks_is_divided_as_one_of_few(count):
    lengths = hh_lengths(8 * count)
    check_division(lengths, count, 8)
    check_division(lengths, count, 9, 0, 4096)


def test_packed_micro_batches_have_the_same_tokens_where_padded_ones_have_the_same_lengths():
    lengths = hh_lengths()
    imbalance = {}
    for is_packed in (True, False):
        chunks = split_evenly(len(lengths), 64, SampleCosts(lengths, is_packed=is_packed))
        tokens = [int(lengths[chunk].sum()) for chunk in chunks]
        imbalance[is_packed] = max(tokens) / np.mean(tokens)
    assert imbalance[False] > 3
    assert imbalance[True] < 2


def test_a_limit_of_tokens_needs_lengths():
    with pytest.raises(RecipeError, match=r"batch\.tokens_per_micro: needs the lengths of samples"):
        make_limits(BatchConfig(total=4, tokens_per_micro=99), 4, None)
    assert make_limits(BatchConfig(total=4), 4, None) == MicroBatchLimits(samples=4)
