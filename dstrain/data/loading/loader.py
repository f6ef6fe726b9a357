"""Batches of each step, made by threads ahead of their use."""

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
from dstrain.data.dataset import Samples
from dstrain.data.loading.sampler import StepSampler
from dstrain.errors import RunError

Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class Step:
    """The data of one optimizer step."""

    batches: list[Batch]
    """The micro-batches of this rank, as many as on every other rank."""
    num_samples: int
    """Samples of the step over all ranks."""
    make_filler: Callable[[], Batch]
    """Make a batch of weight 0 with the step's first sample."""


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
                batches = [
                    self._make_batch(share, int(ids[0]), places)
                    for share, places in self.sampler.micro_batches_with_positions(consumed_samples, self.rank)
                ]
                self._wait_seconds += time.perf_counter() - began
                consumed_samples += len(ids)
                yield Step(batches, len(ids), partial(self._make_batch, [], int(ids[0]), []))
            return
        # Threads, not processes: tokenized samples are memory-mapped, and decoding images releases the GIL.
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="dstrain-loader")
        try:
            yield from self._prefetch_steps(pool, consumed_samples)
        finally:
            # Batches that nobody will use are not made; those in the making end first.
            pool.shutdown(wait=True, cancel_futures=True)

    def _prefetch_steps(self, pool: ThreadPoolExecutor, consumed_samples: int) -> Iterator[Step]:
        queue: deque[tuple[list[Future[Batch]], np.ndarray]] = deque()
        while True:
            began = time.perf_counter()
            # `prefetch` steps and the one that is yielded next.
            while len(queue) <= max(self.prefetch, 0) and (ids := self.sampler.step_ids(consumed_samples)).size:
                mine = self.sampler.micro_batches_with_positions(consumed_samples, self.rank)
                futures = [pool.submit(self._make_batch, share, int(ids[0]), places) for share, places in mine]
                queue.append((futures, ids))
                consumed_samples += len(ids)
            if not queue:
                return
            futures, ids = queue.popleft()
            batches = [future.result() for future in futures]
            self._wait_seconds += time.perf_counter() - began
            yield Step(batches, len(ids), partial(self._make_batch, [], int(ids[0]), []))

    def _make_batch(self, ids: list[int], filler_id: int, positions: list[int]) -> Batch:
        batch = make_batch(self.examples, self.collate, ids, filler_id, positions)
        return batch.pin_memory() if self.pin_memory and _has_gpu() else batch

    def pop_wait_seconds(self) -> float:
        """Return the seconds the consumer has waited for batches since the last call."""
        wait, self._wait_seconds = self._wait_seconds, 0.0
        return wait


def make_batch(
    examples: Samples, collate: Collate, ids: list[int], filler_id: int, positions: Sequence[int] = ()
) -> Batch:
    """Return the batch of these ids, or without ids a filler of weight 0 made from `filler_id`.

    `positions`, given in training, are passed to `collate` as `place` of each sample: augmentation
    draws from them. Raises RunError that names the samples.
    """
    chosen: list[Any] = []
    try:
        chosen.extend(examples[index] for index in (ids or [filler_id]))
        if positions:
            chosen = [_with_position(example, place) for example, place in zip(chosen, positions, strict=True)]
        batch = collate(chosen)
    except Exception as fault:
        names = [example["sample"] for example in chosen if isinstance(example, Mapping) and "sample" in example]
        samples = ", ".join(str(name) for name in names or ids or [filler_id])
        cause = f"{type(fault).__name__}: {fault}"
        raise RunError(f"samples {samples} could not be made into a batch: {cause}; fix or remove them") from fault
    # Ranks without a sample run a forward pass of weight 0: collectives in it need every rank.
    return batch if ids else batch.as_filler()


def _with_position(example: Any, position: int) -> Any:
    return {**example, "place": position} if isinstance(example, Mapping) else example


def iter_batches(examples: Samples, collate: Collate, micro_batches: Sequence[list[int]]) -> Iterator[Batch]:
    """Yield the batches of `eval_micro_batches`, fillers included."""
    for ids in micro_batches:
        yield make_batch(examples, collate, ids, 0)  # any sample serves as filler; the first one always exists


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
