"""The order of a run's samples, and the batches of each step, made by threads ahead of their use."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dstrain.batch import Batch
from dstrain.data.dataset import Samples, takes_positions
from dstrain.data.loading.micro_batches import (
    NO_LIMITS,
    CostFunction,
    MicroBatchLimits,
    of_rank,
    split_by_tokens,
    split_evenly,
)
from dstrain.data.loading.rows import share_tokens
from dstrain.data.rng import EPOCH_STREAM, RECORD_STREAM, make_random_state
from dstrain.distributed.world import SequenceGroup
from dstrain.errors import BadRecord, DataError, RunError, describe_fault

Collate = Callable[..., Batch]
"""Samples -> batch; one with a parameter `positions` gets the samples' positions in the run, None in an evaluation."""


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

    def step_size(self, consumed_samples: int) -> int:
        """Return the number of samples of the step after `consumed_samples`; 0 if the run is over."""
        if self.total_samples is None:
            return self.samples_per_step
        return max(min(self.samples_per_step, self.total_samples - consumed_samples), 0)

    def step_ids(self, consumed_samples: int) -> np.ndarray:
        """Return the ids of the step after `consumed_samples`; empty if the run is over."""
        stop = consumed_samples + self.step_size(consumed_samples)
        # np.concatenate needs a part, also when the run is over.
        parts = [np.zeros(0, dtype=np.int64)]
        # A step may begin in one epoch and end in the next.
        while consumed_samples < stop:
            epoch, start = divmod(consumed_samples, self.samples_per_epoch)
            parts.append(self._epoch_order(epoch)[start : start + stop - consumed_samples])
            consumed_samples += len(parts[-1])
        return np.concatenate(parts)

    def micro_batches(self, ids: np.ndarray, consumed_samples: int, rank: int) -> list[tuple[list[int], list[int]]]:
        """Return (ids, positions) of each of this rank's micro-batches of the step with these `step_ids`.

        Every rank has the same number of them. Without a limit of tokens their sizes differ by at most one. A position
        is the sample's place in the run's order, the same for any world size.
        """
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
            if sum(self.sizes) < 2**31:  # every process of a host has a copy
                order = order.astype(np.int32)
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
    return make_random_state(key).permutation(size).astype(np.int64, copy=False)


@dataclass(frozen=True)
class Step:
    """The data of one optimizer step."""

    batches: list[Batch]
    """The micro-batches of this rank, as many as on every other rank."""
    num_samples: int
    """Samples of the step over all ranks."""
    next_weight: Callable[[], float | None] = lambda: None
    """Return the weight of this rank's batches of the next step; None while they are not made, and at the end."""


_StartedStep = tuple[list[Future[Batch]], int]
"""The batches of a step, which are being made, and its samples over all ranks."""


@dataclass(kw_only=True)
class Loader:
    """Loader of this rank's batches of every step, in the order of the sampler."""

    examples: Samples
    """Dataset that the sampler's ids index; read from several threads at once."""
    collate: Collate
    sampler: StepSampler
    rank: int = 0
    workers: int = 0
    """Threads that read and collate; with 0 each batch is made when it is requested."""
    prefetch: int = 2
    """Steps to read ahead of the one in use."""
    sequence: SequenceGroup | None = None
    """Processes that compute this rank's batches together; `rank` is then the number of their group."""
    pin_memory: bool = False
    """Copy batches to page-locked memory if there is a GPU."""
    _wait_seconds: float = field(default=0.0, init=False)

    def epoch_at(self, consumed_samples: int) -> float:
        """Return passes over the data after so many samples."""
        return self.sampler.epoch_at(consumed_samples)

    def iter_steps(self, consumed_samples: int) -> Generator[Step, None, None]:
        """Yield this rank's batches of each step after the consumed samples, to the end of the run.

        Closing the iterator stops the threads. Raises RunError for samples that cannot be collated.
        """
        if not self.workers:
            while (ids := self.sampler.step_ids(consumed_samples)).size:
                began = time.perf_counter()
                shares = self.sampler.micro_batches(ids, consumed_samples, self.rank)
                batches = [self._make_batch(share, int(ids[0]), places) for share, places in shares]
                self._wait_seconds += time.perf_counter() - began
                consumed_samples += len(ids)
                yield Step(batches, len(ids))
            return
        # Threads, not processes: tokenized samples are memory-mapped, and decoding images releases the GIL. Steps are
        # divided over the ranks in a thread of its own, one after another: they share the order of an epoch.
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="dstrain-loader")
        divider = ThreadPoolExecutor(1, thread_name_prefix="dstrain-loader-sampler")
        try:
            yield from self._prefetch_steps(pool, divider, consumed_samples)
        finally:
            # Batches that nobody will use are not made; those in the making end first.
            divider.shutdown(wait=True, cancel_futures=True)
            pool.shutdown(wait=True, cancel_futures=True)

    def _prefetch_steps(
        self, pool: ThreadPoolExecutor, divider: ThreadPoolExecutor, consumed_samples: int
    ) -> Iterator[Step]:
        queue: deque[Future[_StartedStep]] = deque()
        while True:
            began = time.perf_counter()
            # `prefetch` steps and the one that is yielded next.
            while len(queue) <= max(self.prefetch, 0) and (size := self.sampler.step_size(consumed_samples)):
                queue.append(divider.submit(self._start_step, pool, consumed_samples))
                consumed_samples += size
            if not queue:
                return
            started, num_samples = queue.popleft().result()
            batches = [future.result() for future in started]
            self._wait_seconds += time.perf_counter() - began
            yield Step(batches, num_samples, partial(_weight_of_first, queue))

    def _start_step(self, pool: ThreadPoolExecutor, consumed_samples: int) -> _StartedStep:
        """Divide a step over the ranks, and let the threads of `pool` make this rank's batches."""
        ids = self.sampler.step_ids(consumed_samples)
        shares = self.sampler.micro_batches(ids, consumed_samples, self.rank)
        return [pool.submit(self._make_batch, share, int(ids[0]), places) for share, places in shares], len(ids)

    def _make_batch(self, ids: list[int], filler_id: int, positions: list[int]) -> Batch:
        batch = make_batch(self.examples, self.collate, ids, filler_id, positions, self.sequence)
        return batch.pin_memory() if self.pin_memory and _has_gpu() else batch

    def pop_wait_seconds(self) -> float:
        """Return the seconds the consumer has waited for batches since the last call."""
        wait, self._wait_seconds = self._wait_seconds, 0.0
        return wait


def _weight_of_first(queue: Sequence[Future[_StartedStep]]) -> float | None:
    """Return the weight of this rank's batches of the first step; None without one, or before all are made."""
    if not queue or not _has_result(queue[0]):
        return None
    batches, _ = queue[0].result()
    return sum(future.result().weight for future in batches) if all(map(_has_result, batches)) else None


def _has_result(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def make_batch(
    examples: Samples,
    collate: Collate,
    ids: list[int],
    filler_id: int,
    positions: Sequence[int] = (),
    sequence: SequenceGroup | None = None,
) -> Batch:
    """Return the batch of these ids, or without ids a filler of weight 0 made from `filler_id`.

    `positions`, given in training, are those of the samples in the run: augmentation draws from them. `sequence`: the
    processes that compute it together. Raises RunError that names the samples, and the line of the task's own code.
    """
    chosen: list[Any] = []
    try:
        chosen.extend(examples[index] for index in (ids or [filler_id]))
        batch = (
            collate(chosen, positions=list(positions)) if positions and takes_positions(collate) else collate(chosen)
        )
        if not isinstance(batch, Batch):
            raise TypeError(f"collate returned {type(batch).__name__}, not a Batch")
        # Padded, as a frozen model of another family may read them, each process of the group computes all of it.
        if sequence is not None and batch.is_packed:
            batch = share_tokens(batch, sequence)
    except Exception as fault:
        # The index of its record, where the example is of a token store.
        names = [e["sample"] for e in chosen if isinstance(e, Mapping) and type(e.get("sample")) is int]
        samples = ", ".join(str(name) for name in names or ids or [filler_id])
        fix = "; fix or remove them" if isinstance(fault, BadRecord | OSError) else ""
        store = getattr(examples, "store", None)
        if store is not None and (change := store.find_change()):
            raise RunError(f"{change}, and samples {samples} cannot be read; start again") from fault
        raise RunError(f"samples {samples} could not be made into a batch: {describe_fault(fault)}{fix}") from fault
    # Ranks without a sample run a forward pass of weight 0: collectives in it need every rank.
    return batch if ids else batch.as_filler()


def eval_micro_batches(
    num_samples: int, limits: MicroBatchLimits, world_size: int, rank: int, costs: CostFunction | None = None
) -> list[list[int]]:
    """Return the micro-batches of this rank; all ranks together have each sample once.

    Every rank has the same number of them, none above the limits; an empty one is a filler. The limit of tokens needs
    costs. With them, samples are divided as in training.
    """
    found = None if costs is None else costs(np.arange(num_samples))
    if limits.tokens is not None and found is not None:
        return [chunk.tolist() for chunk in of_rank(split_by_tokens(found, limits, world_size), world_size, rank)]
    passes = -(-num_samples // ((limits.samples or 1) * world_size))
    return [
        chunk.tolist() for chunk in of_rank(split_evenly(num_samples, passes * world_size, found), world_size, rank)
    ]


def iter_batches(
    examples: Samples,
    collate: Collate,
    micro_batches: Sequence[list[int]],
    sequence: SequenceGroup | None = None,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Yield the batches of `eval_micro_batches`, fillers included, as `sequence` computes them.

    `pin_memory`: in page-locked memory, where there is a GPU.
    """
    for ids in micro_batches:
        # Any sample serves as filler; the first one always exists.
        batch = make_batch(examples, collate, ids, 0, sequence=sequence)
        yield batch.pin_memory() if pin_memory and _has_gpu() else batch


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
