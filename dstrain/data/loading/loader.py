"""Reads ahead: turns the plan's ids into batches on the host while the device works."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dstrain.batch import Batch
from dstrain.data.loading.sampler import DataPlan
from dstrain.errors import RunError

Collate = Callable[[list[Any]], Batch]


@dataclass(kw_only=True)
class Loader:
    """This rank's batches of every step, in the plan's order."""

    examples: Sequence[Any]
    """What the plan's ids index; read from several threads at once."""
    collate: Collate
    plan: DataPlan
    rank: int = 0
    workers: int = 0
    """Threads that read and collate; 0: none, each batch is made when it is asked for."""
    prefetch: int = 2
    """Steps to be ahead of the one in use."""
    pin: bool = False
    """Page-locked memory, where there is a GPU to copy to."""
    _wait: float = field(default=0.0, init=False)

    @property
    def samples_per_step(self) -> int:
        return self.plan.samples_per_step

    def steps(self, samples: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step after `samples` samples, to the end of the plan.

        Closing the iterator stops the threads.
        """
        if not self.workers:
            while (ids := self.plan.ids(samples)).size:
                began = time.perf_counter()
                batches = [self._make(share, int(ids[0]), places) for share, places in self._mine(samples)]
                self._wait += time.perf_counter() - began
                samples += len(ids)
                yield batches
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="dstrain-loader")
        try:
            yield from self._ahead(pool, samples)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _ahead(self, pool: ThreadPoolExecutor, samples: int) -> Iterator[list[Batch]]:
        queue: deque[list[Future[Batch]]] = deque()
        while True:
            while len(queue) <= max(self.prefetch, 0) and (ids := self.plan.ids(samples)).size:
                mine = self._mine(samples)
                queue.append([pool.submit(self._make, share, int(ids[0]), places) for share, places in mine])
                samples += len(ids)
            if not queue:
                return
            began = time.perf_counter()
            batches = [future.result() for future in queue.popleft()]
            self._wait += time.perf_counter() - began
            yield batches

    def _mine(self, samples: int) -> Iterator[tuple[list[int], list[int]]]:
        """This rank's ids of each micro-batch, and their places in the run's order."""
        return zip(self.plan.share(samples, self.rank), self.plan.places(samples, self.rank), strict=True)

    def _make(self, ids: list[int], stand_in: int, places: list[int]) -> Batch:
        batch = make_batch(self.examples, self.collate, ids, stand_in, places)
        return batch.pin() if self.pin and _has_gpu() else batch

    def take_wait(self) -> float:
        """Seconds the consumer waited for batches since this was last asked."""
        wait, self._wait = self._wait, 0.0
        return wait


def make_batch(
    examples: Sequence[Any], collate: Collate, ids: list[int], stand_in: int, places: Sequence[int] = ()
) -> Batch:
    """The batch of these ids; of the stand-in, weighing nothing, where there are none.

    Where `places` are given, for training, `collate` finds each sample's under `place`.
    """
    chosen: list[Any] = []
    try:
        chosen.extend(examples[index] for index in (ids or [stand_in]))
        if places:
            chosen = [_placed(example, place) for example, place in zip(chosen, places, strict=True)]
        batch = collate(chosen)
    except Exception as fault:
        names = [example["sample"] for example in chosen if isinstance(example, Mapping) and "sample" in example]
        samples = ", ".join(str(name) for name in names or ids or [stand_in])
        cause = f"{type(fault).__name__}: {fault}"
        raise RunError(f"samples {samples} could not be made into a batch: {cause}; fix or remove them") from fault
    return batch if ids else batch.as_filler()


def _placed(example: Any, place: int) -> Any:
    return {**example, "place": place} if isinstance(example, Mapping) else example


def read_shares(examples: Sequence[Any], collate: Collate, shares: Sequence[list[int]]) -> Iterator[Batch]:
    """The batches of `eval_share`, fillers included."""
    for ids in shares:
        yield make_batch(examples, collate, ids, 0)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
