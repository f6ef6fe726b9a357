"""Sampler: the sample ids of each step, from seed and position, for any world size; seeded random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dstrain.data.loading.micro_batches import (
    NO_LIMITS,
    CostFunction,
    MicroBatchLimits,
    of_rank,
    split_by_tokens,
    split_evenly,
)
from dstrain.errors import DataError

RECORD_STREAM, EPOCH_STREAM = 1, 2
"""Order of the records of a source; order of the samples of an epoch."""
IMAGE_STREAM = 4
"""Augmentation of images."""
CORRUPTION_STREAM = 6
"""Corrupted copies of images, which a loss compares with the images."""
RESIDUE_STREAM = 7
"""Windows of protein chains, and the residues that are hidden."""


def make_random_state(key: Sequence[int]) -> np.random.RandomState:
    """Return a generator fixed by the key, such as (seed, stream, epoch); its numbers are below 2**64.

    RandomState, because NEP 19 freezes its stream for all versions of numpy.
    """
    return np.random.RandomState([word for number in key for word in (number % 2**32, number // 2**32 % 2**32)])


@dataclass(frozen=True, kw_only=True)
class StepSampler:
    """The order of all samples of a run. Its whole state is one integer: the samples consumed."""

    sizes: tuple[int, ...]
    """Records of each source; ids count through the sources one after another."""
    weights: tuple[float, ...] | None = None
    """Passes over each source per epoch: 0.5 is half of it (the next epoch takes the other half)."""
    seed: int
    samples_per_step: int
    """Samples of one optimizer step, over all processes."""
    world_size: int
    accumulate: int | None
    """Micro-batches of one rank in one step; None: as many as the limit of tokens takes, which differs between steps."""
    limits: MicroBatchLimits = NO_LIMITS
    """Limits of a micro-batch, where `accumulate` is None."""
    total_samples: int | None = None
    """Samples of the whole run; None: no end."""
    costs: CostFunction | None = field(default=None, compare=False)
    """Costs of samples, by which a step's are divided; needed for a limit of tokens. None: in the order of the run."""
    _epoch_orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = (1.0,) * len(self.sizes) if self.weights is None else tuple(self.weights)
        assert len(weights) == len(self.sizes), "one weight for each source"
        assert min(self.samples_per_step, self.world_size) >= 1
        if self.accumulate is None:
            assert self.limits.tokens, "or the number of micro-batches"
            assert self.costs is not None, "of which the tokens are the sum"
        # The dataclass is frozen; weights are normalized once here.
        object.__setattr__(self, "weights", weights)
        for source, (size, weight, slots) in enumerate(zip(self.sizes, weights, self.samples_per_source, strict=True)):
            if slots < 1:
                raise DataError(
                    f"source {source} with {size} records and weight {weight:g} would never be shown; "
                    "give it more records or a larger weight"
                )
        if not self.sizes:
            raise DataError("there is no source to take samples from; name a file in data.train")

    @property
    def samples_per_source(self) -> tuple[int, ...]:
        """Samples of one epoch from each source."""
        weights = self.weights or (1.0,) * len(self.sizes)
        return tuple(round(weight * size) for weight, size in zip(weights, self.sizes, strict=True))

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.samples_per_source)

    def epoch_at(self, consumed_samples: int) -> float:
        """Return the epochs completed after this many samples, with the fraction."""
        return consumed_samples / self.samples_per_epoch

    def step_ids(self, consumed_samples: int) -> np.ndarray:
        """Return the ids of the step after `consumed_samples`; empty if the run is over."""
        stop = consumed_samples + self.samples_per_step
        if self.total_samples is not None:
            stop = max(min(stop, self.total_samples), consumed_samples)
        # np.concatenate needs a part, also when the run is over.
        parts = [np.zeros(0, dtype=np.int64)]
        # A step may begin in one epoch and end in the next.
        while consumed_samples < stop:
            epoch, start = divmod(consumed_samples, self.samples_per_epoch)
            parts.append(self._epoch_order(epoch)[start : start + stop - consumed_samples])
            consumed_samples += len(parts[-1])
        return np.concatenate(parts)

    def micro_batches(self, consumed_samples: int, rank: int) -> list[list[int]]:
        """Return the ids of this rank's micro-batches of a step.

        Every rank has the same number of them. Without a limit of tokens their sizes differ by at most one.
        """
        return [ids for ids, _ in self.micro_batches_with_positions(consumed_samples, rank)]

    def positions(self, consumed_samples: int, rank: int) -> list[list[int]]:
        """Return the positions of the samples of `micro_batches` in the run's order.

        A sample's position is the same for any world size.
        """
        return [places for _, places in self.micro_batches_with_positions(consumed_samples, rank)]

    def micro_batches_with_positions(self, consumed_samples: int, rank: int) -> list[tuple[list[int], list[int]]]:
        """Return (ids, positions) of each of this rank's micro-batches of a step."""
        ids = self.step_ids(consumed_samples)
        share = of_rank(self._split_step(ids), self.world_size, rank)
        return [(ids[chunk].tolist(), (consumed_samples + chunk).tolist()) for chunk in share]

    def _split_step(self, ids: np.ndarray) -> list[np.ndarray]:
        """Return indices into the step's ids, one array for each micro-batch of all ranks."""
        costs = None if self.costs is None else self.costs(ids)
        if self.accumulate is not None:
            return split_evenly(len(ids), self.accumulate * self.world_size, costs)
        assert costs is not None
        return split_by_tokens(costs, self.limits, self.world_size)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the ids of an epoch; the last two epochs are cached, as a step may span both."""
        order = self._epoch_orders.get(epoch)
        if order is None:
            # First id of each source.
            starts = np.cumsum((0, *self.sizes))[:-1]
            order = np.concatenate([start + self._source_ids(source, epoch) for source, start in enumerate(starts)])
            # The sources were one after another: mix them.
            order = order[_make_permutation(len(order), (self.seed, EPOCH_STREAM, epoch))]
            while len(self._epoch_orders) > 1:
                self._epoch_orders.pop(next(iter(self._epoch_orders)))
            self._epoch_orders[epoch] = order
        return order

    def _source_ids(self, source: int, epoch: int) -> np.ndarray:
        """Return the source's records for an epoch: the next part of an endless stream of permutations.

        So every record is used once before any is used twice, whatever the weight.
        """
        size, count = self.sizes[source], self.samples_per_source[source]
        position, stop = epoch * count, (epoch + 1) * count
        parts = []
        while position < stop:
            lap, start = divmod(position, size)
            order = _make_permutation(size, (self.seed, RECORD_STREAM, source, lap))
            parts.append(order[start : start + stop - position])
            position += len(parts[-1])
        return np.concatenate(parts)


def _make_permutation(size: int, key: Sequence[int]) -> np.ndarray:
    """Return a permutation fixed by the key."""
    return make_random_state(key).permutation(size).astype(np.int64)


def eval_micro_batches(
    num_samples: int, limits: MicroBatchLimits, ranks: tuple[int, int], costs: CostFunction | None = None
) -> list[list[int]]:
    """Return the micro-batches of this rank, `ranks`: (world size, rank); all ranks together have each sample once.

    Every rank has the same number of them, none above the limits; an empty one is a filler. The limit of tokens needs
    costs. With them, samples are divided as in training.
    """
    world_size, rank = ranks
    found = None if costs is None else costs(np.arange(num_samples))
    if limits.tokens is not None and found is not None:
        return [chunk.tolist() for chunk in of_rank(split_by_tokens(found, limits, world_size), world_size, rank)]
    passes = -(-num_samples // ((limits.samples or 1) * world_size))
    return [
        chunk.tolist() for chunk in of_rank(split_evenly(num_samples, passes * world_size, found), world_size, rank)
    ]
