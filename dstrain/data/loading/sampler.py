"""Which samples each step takes: arithmetic on (seed, epoch, position), the same for any world size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dstrain.data.dataset import LengthFunction
from dstrain.data.rng import EPOCH_STREAM, RECORD_STREAM, make_random_state
from dstrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class StepSampler:
    """The order of all samples of a run. Its whole state is one integer: how many samples were taken."""

    sizes: tuple[int, ...]
    """Records in each source; ids count through the sources one after another."""
    weights: tuple[float, ...] | None = None
    """How often an epoch shows each source: 0.5 shows half of it (the other half in the next epoch), 2 all twice."""
    seed: int
    samples_per_step: int
    """Samples of one optimizer step, over all processes."""
    world_size: int
    accumulate: int
    """Micro-batches of one rank in one step."""
    total_samples: int | None = None
    """Where the run ends; None: never."""
    shuffle: bool = True
    lengths: LengthFunction | None = field(default=None, compare=False)
    """Where given, the samples of a step are sorted by it before they are cut into micro-batches: little padding."""
    _epoch_orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = (1.0,) * len(self.sizes) if self.weights is None else tuple(self.weights)
        assert len(weights) == len(self.sizes), "one weight for each source"
        assert min(self.samples_per_step, self.world_size, self.accumulate) >= 1
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
        """Samples that one epoch takes from each source."""
        weights = self.weights or (1.0,) * len(self.sizes)
        return tuple(round(weight * size) for weight, size in zip(weights, self.sizes, strict=True))

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.samples_per_source)

    @property
    def num_steps(self) -> int | None:
        """Steps of the run; the last one may take fewer samples."""
        return None if self.total_samples is None else math.ceil(self.total_samples / self.samples_per_step)

    def epoch_at(self, consumed_samples: int) -> float:
        """Epochs done after this many samples, with the fraction."""
        return consumed_samples / self.samples_per_epoch

    def step_ids(self, consumed_samples: int) -> np.ndarray:
        """The ids of the step that starts after `samples` samples; empty where the run is over."""
        stop = consumed_samples + self.samples_per_step
        if self.total_samples is not None:
            stop = max(min(stop, self.total_samples), consumed_samples)
        parts = [np.zeros(0, dtype=np.int64)]
        while consumed_samples < stop:
            epoch, start = divmod(consumed_samples, self.samples_per_epoch)
            parts.append(self._epoch_order(epoch)[start : start + stop - consumed_samples])
            consumed_samples += len(parts[-1])
        return np.concatenate(parts)

    def micro_batches(self, consumed_samples: int, rank: int) -> list[list[int]]:
        """The step's micro-batches of this rank: as many on every rank, of sizes that differ by at most one."""
        ids = self.step_ids(consumed_samples)
        return [ids[chunk].tolist() for chunk in self._split_step(ids, rank)]

    def positions(self, consumed_samples: int, rank: int) -> list[list[int]]:
        """The position of each sample of `share` in the run's order, the same for any world size."""
        return [
            (consumed_samples + chunk).tolist() for chunk in self._split_step(self.step_ids(consumed_samples), rank)
        ]

    def _split_step(self, ids: np.ndarray, rank: int) -> list[np.ndarray]:
        """Indices into the step's ids, one array for each micro-batch of this rank."""
        order = np.arange(len(ids)) if self.lengths is None else sort_longest_first(self.lengths(ids))
        return split_for_rank(order, self.accumulate, self.world_size, rank)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """The ids of an epoch. The last two are kept: a step may cross from one into the next."""
        order = self._epoch_orders.get(epoch)
        if order is None:
            starts = np.cumsum((0, *self.sizes))[:-1]
            order = np.concatenate([start + self._source_ids(source, epoch) for source, start in enumerate(starts)])
            if self.shuffle:
                order = order[_make_permutation(len(order), (self.seed, EPOCH_STREAM, epoch))]
            while len(self._epoch_orders) > 1:
                self._epoch_orders.pop(next(iter(self._epoch_orders)))
            self._epoch_orders[epoch] = order
        return order

    def _source_ids(self, source: int, epoch: int) -> np.ndarray:
        """The source's records for an epoch: the next piece of an endless stream of its permutations."""
        size, count = self.sizes[source], self.samples_per_source[source]
        place, stop = epoch * count, (epoch + 1) * count
        parts = []
        while place < stop:
            lap, start = divmod(place, size)
            order = (
                _make_permutation(size, (self.seed, RECORD_STREAM, source, lap)) if self.shuffle else np.arange(size)
            )
            parts.append(order[start : start + stop - place])
            place += len(parts[-1])
        return np.concatenate(parts)


def _make_permutation(size: int, key: Sequence[int]) -> np.ndarray:
    """A permutation fixed by the key."""
    return make_random_state(key).permutation(size).astype(np.int64)


def sort_longest_first(lengths: np.ndarray) -> np.ndarray:
    """(N,) indices, the longest sample first, those of equal length in their order.

    The largest micro-batch is then the first of every step: memory that does not suffice is found in the first one.
    """
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def split_for_rank(order: np.ndarray, num_micro_batches: int, world_size: int, rank: int) -> list[np.ndarray]:
    """This rank's `count` micro-batches: of each run of `world_size` neighbouring pieces, one goes to each rank.

    Pieces differ in size by at most one. The ranks' j-th micro-batches are neighbours, so that none waits long for another.
    """
    pieces = np.array_split(order, world_size * num_micro_batches) if num_micro_batches else []
    return pieces[rank::world_size]


def eval_micro_batches(
    num_samples: int, micro: int, world_size: int, rank: int, lengths: LengthFunction | None = None
) -> list[list[int]]:
    """This rank's micro-batches of an evaluation: each sample once over all ranks, as many batches on every rank.

    None is larger than `micro`; an empty one stands for a filler. With `lengths`, samples of like length stand together.
    """
    ids = np.arange(num_samples)
    order = ids if lengths is None else sort_longest_first(lengths(ids))
    return [
        chunk.tolist()
        for chunk in split_for_rank(order, math.ceil(num_samples / (micro * world_size)), world_size, rank)
    ]
