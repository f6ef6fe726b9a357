"""Which samples each step takes: arithmetic on (seed, epoch, position), the same for any world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dstrain.errors import DataError

Lengths = Callable[[np.ndarray], np.ndarray]
"""(N,) ids -> (N,) tokens of the longest sequence of each."""

# Streams that share a seed but not their numbers.
_RECORDS, _SLOTS = 1, 2
IMAGES = 4


@dataclass(frozen=True, kw_only=True)
class DataPlan:
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
    lengths: Lengths | None = field(default=None, compare=False)
    """Where given, the samples of a step are sorted by it before they are cut into micro-batches: little padding."""
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = (1.0,) * len(self.sizes) if self.weights is None else tuple(self.weights)
        assert len(weights) == len(self.sizes), "one weight for each source"
        assert min(self.samples_per_step, self.world_size, self.accumulate) >= 1
        object.__setattr__(self, "weights", weights)
        for source, (size, weight, slots) in enumerate(zip(self.sizes, weights, self.slots, strict=True)):
            if slots < 1:
                raise DataError(
                    f"source {source} with {size} records and weight {weight:g} would never be shown; "
                    "give it more records or a larger weight"
                )
        if not self.sizes:
            raise DataError("there is no source to take samples from; name a file in data.train")

    @property
    def slots(self) -> tuple[int, ...]:
        """Samples that one epoch takes from each source."""
        weights = self.weights or (1.0,) * len(self.sizes)
        return tuple(round(weight * size) for weight, size in zip(weights, self.sizes, strict=True))

    @property
    def samples_per_epoch(self) -> int:
        return sum(self.slots)

    @property
    def steps(self) -> int | None:
        """Steps of the run; the last one may take fewer samples."""
        return None if self.total_samples is None else math.ceil(self.total_samples / self.samples_per_step)

    def epoch(self, samples: int) -> float:
        """Epochs done after this many samples, with the fraction."""
        return samples / self.samples_per_epoch

    def ids(self, samples: int) -> np.ndarray:
        """The ids of the step that starts after `samples` samples; empty where the run is over."""
        stop = samples + self.samples_per_step
        if self.total_samples is not None:
            stop = max(min(stop, self.total_samples), samples)
        parts = [np.zeros(0, dtype=np.int64)]
        while samples < stop:
            epoch, start = divmod(samples, self.samples_per_epoch)
            parts.append(self._order(epoch)[start : start + stop - samples])
            samples += len(parts[-1])
        return np.concatenate(parts)

    def share(self, samples: int, rank: int) -> list[list[int]]:
        """The step's micro-batches of this rank: as many on every rank, of sizes that differ by at most one."""
        ids = self.ids(samples)
        return [ids[chunk].tolist() for chunk in self._split(ids, rank)]

    def places(self, samples: int, rank: int) -> list[list[int]]:
        """The position of each sample of `share` in the run's order, the same for any world size."""
        return [(samples + chunk).tolist() for chunk in self._split(self.ids(samples), rank)]

    def _split(self, ids: np.ndarray, rank: int) -> list[np.ndarray]:
        """Indices into the step's ids, one array for each micro-batch of this rank."""
        order = np.arange(len(ids)) if self.lengths is None else by_length(self.lengths(ids))
        return deal(order, self.accumulate, self.world_size, rank)

    def _order(self, epoch: int) -> np.ndarray:
        """The ids of an epoch. The last two are kept: a step may cross from one into the next."""
        order = self._orders.get(epoch)
        if order is None:
            starts = np.cumsum((0, *self.sizes))[:-1]
            order = np.concatenate([start + self._slots(source, epoch) for source, start in enumerate(starts)])
            if self.shuffle:
                order = order[_permutation(len(order), (self.seed, _SLOTS, epoch))]
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = order
        return order

    def _slots(self, source: int, epoch: int) -> np.ndarray:
        """The source's records for an epoch: the next piece of an endless stream of its permutations."""
        size, count = self.sizes[source], self.slots[source]
        place, stop = epoch * count, (epoch + 1) * count
        parts = []
        while place < stop:
            lap, start = divmod(place, size)
            order = _permutation(size, (self.seed, _RECORDS, source, lap)) if self.shuffle else np.arange(size)
            parts.append(order[start : start + stop - place])
            place += len(parts[-1])
        return np.concatenate(parts)


def _permutation(size: int, key: Sequence[int]) -> np.ndarray:
    """A permutation fixed by the key."""
    return random_numbers(key).permutation(size).astype(np.int64)


def random_numbers(key: Sequence[int]) -> np.random.RandomState:
    """Fixed by the key. RandomState, because NEP 19 freezes its stream for all versions of numpy."""
    return np.random.RandomState([word for number in key for word in (number % 2**32, number // 2**32 % 2**32)])


def lengths_of(examples: Any) -> Lengths | None:
    """The method `lengths` of a task's examples, where they have one."""
    found = getattr(examples, "lengths", None)
    return found if callable(found) else None


def by_length(lengths: np.ndarray) -> np.ndarray:
    """(N,) indices, the longest sample first, those of equal length in their order.

    The largest micro-batch is then the first of every step: memory that does not suffice is found in the first one.
    """
    return np.argsort(-lengths.astype(np.int64), kind="stable")


def deal(order: np.ndarray, count: int, world_size: int, rank: int) -> list[np.ndarray]:
    """This rank's `count` micro-batches: of each run of `world_size` neighbouring pieces, one goes to each rank.

    Pieces differ in size by at most one. The ranks' j-th micro-batches are neighbours, so that none waits long for another.
    """
    pieces = np.array_split(order, world_size * count) if count else []
    return pieces[rank::world_size]


def eval_share(size: int, micro: int, world_size: int, rank: int, lengths: Lengths | None = None) -> list[list[int]]:
    """This rank's micro-batches of an evaluation: each sample once over all ranks, as many batches on every rank.

    None is larger than `micro`; an empty one stands for a filler. With `lengths`, samples of like length stand together.
    """
    ids = np.arange(size)
    order = ids if lengths is None else by_length(lengths(ids))
    return [chunk.tolist() for chunk in deal(order, math.ceil(size / (micro * world_size)), world_size, rank)]
