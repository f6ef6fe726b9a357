"""Division of samples into micro-batches of a limited number of samples or tokens, alike on every rank."""

# N samples, R sequences of a sample. A cost is a number of tokens that a forward pass computes.

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dstrain.batch import PackingMode
from dstrain.config.schema import BatchConfig
from dstrain.data.dataset import Dataset, SequenceLengthsFunction
from dstrain.errors import Fault, RecipeError


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits of one micro-batch. A sample above the limit of tokens is a micro-batch of its own."""

    samples: int | None = None
    tokens: int | None = None
    """Tokens that the forward pass computes, padding included."""


NO_LIMITS = MicroBatchLimits()


@dataclass(frozen=True)
class SampleCosts:
    """Costs of N samples in the micro-batches of a run."""

    tokens: np.ndarray
    """(N,) cost of each sample: of all its sequences in a packed batch; of its longest row in a padded one."""
    rows: int = 1
    """Rows of one sample in a padded batch."""
    is_packed: bool = False

    def of(self, chunk: np.ndarray) -> int:
        """Return the cost of a micro-batch of these samples: rows x longest row if it is padded."""
        if not len(chunk):
            return 0
        tokens = self.tokens[chunk]
        return int(tokens.sum() if self.is_packed else tokens.max() * self.rows * len(chunk))


CostFunction = Callable[[np.ndarray], SampleCosts]
"""(N,) sample ids -> their costs."""


def make_cost_function(dataset: Dataset, packing: PackingMode) -> CostFunction | None:
    """Return the costs of a dataset's samples in the task's form of batches; None where their lengths are unknown."""
    return None if dataset.sequence_lengths is None else costs_of(dataset.sequence_lengths, packing)


def costs_of(lengths: SequenceLengthsFunction, packing: PackingMode) -> CostFunction:
    """Return the costs of samples with these lengths."""

    def costs(ids: np.ndarray) -> SampleCosts:
        found = lengths(ids)
        rows = found.sequences.shape[1]
        if not packing.is_packed:
            return SampleCosts(found.sequences.max(1), rows)
        repeated = (rows - 1) * found.prefixes if packing.shares_prefixes else 0
        return SampleCosts(found.sequences.sum(1) - repeated, is_packed=True)

    return costs


def make_limits(batch: BatchConfig, samples: int, costs: CostFunction | None) -> MicroBatchLimits:
    """Return the limits of a micro-batch; `samples` where the recipe limits no tokens.

    Raises RecipeError for a limit of tokens where the costs of samples are unknown.
    """
    if batch.tokens_per_micro is None:
        return MicroBatchLimits(samples=samples)
    if costs is None:
        problem = "needs the lengths of samples, which the dataset of this task does not give"
        raise RecipeError(
            Fault(
                "batch.tokens_per_micro",
                problem,
                "use batch.micro, or name the task's columns of tokens in `token_columns`",
            )
        )
    return MicroBatchLimits(samples=batch.micro, tokens=batch.tokens_per_micro)


def split_evenly(num_samples: int, num_micro_batches: int, costs: SampleCosts | None = None) -> list[np.ndarray]:
    """Return the micro-batches of all ranks, arrays of indices whose sizes differ by at most one.

    Every `world_size` adjacent ones are those of the ranks at one position. Without costs the order of the samples
    stays. Padded batches take samples of similar length, longest first, for little padding. Packed batches have none,
    and take samples whose sum of tokens is the same in each.
    """
    if not num_micro_batches:
        return []
    if costs is None:
        return np.array_split(np.arange(num_samples), num_micro_batches)
    order = sort_longest_first(costs.tokens)
    if not costs.is_packed:
        return np.array_split(order, num_micro_batches)
    least, larger = divmod(num_samples, num_micro_batches)
    chunks = _balance(costs.tokens[order], num_micro_batches, least, larger)
    assert chunks is not None, "without a limit of tokens"
    return _largest_first([order[chunk] for chunk in chunks], costs)


def split_by_tokens(costs: SampleCosts, limits: MicroBatchLimits, world_size: int) -> list[np.ndarray]:
    """Return micro-batches within the limits, arrays of indices: as few for each rank as possible, and of similar cost.

    Their number is a multiple of the world size, and every `world_size` adjacent ones are those of the ranks at one
    position. They are sorted by cost, largest first: a lack of memory shows in the first pass, and ranks that wait for
    each other at every pass wait little. Empty ones, for filler batches, are left where there are too few samples.
    """
    assert limits.tokens is not None
    if not len(costs.tokens):
        return []
    split = _split_packed if costs.is_packed else _split_padded
    return _distribute(_largest_first(split(costs, limits, world_size), costs), world_size)


def sort_longest_first(lengths: np.ndarray) -> np.ndarray:
    """Return (N,) indices, the longest sample first; samples of equal length keep their order.

    The largest micro-batch is then the first of every step, so a lack of memory shows in the first.
    """
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def of_rank(micro_batches: Sequence[np.ndarray], world_size: int, rank: int) -> list[np.ndarray]:
    """Return a rank's share: of every `world_size` adjacent micro-batches, each rank has one."""
    return [*micro_batches[rank::world_size]]


def _split_padded(costs: SampleCosts, limits: MicroBatchLimits, world_size: int) -> list[np.ndarray]:
    """Return chunks of samples sorted by length: the fewest within the limits, then of the least largest cost."""
    order = sort_longest_first(costs.tokens)
    row_tokens, most = (costs.tokens[order] * costs.rows).clip(min=1).tolist(), limits.samples or len(order)

    def cut(tokens: int) -> list[int]:
        """Return the end of each chunk: as many samples as the cost allows, counted with the longest, the first."""
        ends = [0]
        while ends[-1] < len(order):
            ends.append(min(ends[-1] + max(1, min(tokens // row_tokens[ends[-1]], most)), len(order)))
        return ends[1:]

    assert limits.tokens is not None
    wanted = -(-len(cut(limits.tokens)) // world_size) * world_size
    least = _bisect(min(row_tokens[0], limits.tokens), limits.tokens, lambda tokens: len(cut(tokens)) <= wanted)
    chunks = np.split(order, cut(least)[:-1])
    # Further ones would be empty: the ranks that had them would wait for the others.
    heap = [(-costs.of(chunk), at) for at, chunk in enumerate(chunks)]
    heapq.heapify(heap)
    while len(chunks) < min(wanted, len(order)):
        at = heapq.heappop(heap)[1]
        if len(chunks[at]) < 2:
            continue
        chunks[at], rest = np.array_split(chunks[at], 2)
        chunks.append(rest)
        for place in (at, len(chunks) - 1):
            heapq.heappush(heap, (-costs.of(chunks[place]), place))
    return chunks + [order[:0]] * (wanted - len(chunks))


def _split_packed(costs: SampleCosts, limits: MicroBatchLimits, world_size: int) -> list[np.ndarray]:
    """Return chunks of similar sums of tokens, as few as fit the limits."""
    order = sort_longest_first(costs.tokens)
    tokens, most, limit = costs.tokens[order], limits.samples or len(order), limits.tokens
    assert limit is not None

    def attempt(passes: int) -> list[np.ndarray] | None:
        return _balance(tokens, passes * world_size, most, 0, limit)

    # Two samples above half of the limit never share a micro-batch; one above the limit counts as one that fills it.
    filled, halves = int(tokens.clip(max=limit).sum()) / limit, int((2 * tokens > limit).sum())
    least = math.ceil(max(filled, halves, len(tokens) / most) / world_size)
    passes = _bisect(max(least, 1), -(-len(tokens) // world_size), lambda count: attempt(count) is not None)
    chunks = attempt(passes)
    assert chunks is not None, "each sample fits alone"
    return [order[chunk] for chunk in chunks]


def _balance(
    tokens: np.ndarray, num_bins: int, most_samples: int, num_larger: int = 0, limit: int | None = None
) -> list[np.ndarray] | None:
    """Return the indices of each bin, or None where they do not fit: each goes to the bin with the fewest tokens.

    `num_larger` bins take one sample more than `most_samples`; `limit`: tokens of a bin. `tokens`: (N,), largest first (Graham, "Bounds on multiprocessing timing anomalies", 1969: longest processing time
    first). Of bins with equally many tokens the first is taken.
    """
    chosen = np.empty(len(tokens), dtype=np.int64)  # the bin of each index
    totals, counts = np.zeros((2, num_bins), dtype=np.int64)
    larger, start = num_larger, 0
    while start < len(tokens):
        free = np.flatnonzero(counts < most_samples + (larger > 0))
        # One sample for each bin, as long as no bin that just got one has the fewest tokens again.
        emptiest = free[np.argsort(totals[free], kind="stable")][: len(tokens) - start]
        if not len(emptiest):
            return None
        before = totals[emptiest]
        after = before + tokens[start : start + len(emptiest)]
        becomes_larger = counts[emptiest] >= most_samples
        ends = (np.minimum.accumulate(after)[:-1] <= before[1:]) | (becomes_larger.cumsum()[1:] > larger)
        stop = 1 + int(ends.argmax()) if ends.any() else len(emptiest)
        emptiest, before, after = emptiest[:stop], before[:stop], after[:stop]
        if limit is not None and ((before > 0) & (after > limit)).any():
            return None
        chosen[start : start + stop], totals[emptiest] = emptiest, after
        counts[emptiest] += 1
        larger -= int(becomes_larger[:stop].sum())
        start += stop
    return np.split(np.argsort(chosen, kind="stable"), counts.cumsum()[:-1])


def _largest_first(chunks: list[np.ndarray], costs: SampleCosts) -> list[np.ndarray]:
    return sorted(chunks, key=lambda chunk: -costs.of(chunk))


def _distribute(chunks: list[np.ndarray], world_size: int) -> list[np.ndarray]:
    """Reverse every second group of `world_size`: no rank has the largest at every position."""
    groups = [chunks[start : start + world_size] for start in range(0, len(chunks), world_size)]
    return [chunk for at, group in enumerate(groups) for chunk in (group[::-1] if at % 2 else group)]


def _bisect(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the smallest number from `low` to `high` that fits; `high` does."""
    if low >= high or fits(low):
        return min(low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
