"""A World whose ranks are threads of one process: for tests of what ranks must agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dstrain.distributed.collective_log import CollectiveLog

T = TypeVar("T")


class ThreadWorld:
    """One rank among `size` threads. A rank left alone in a collective raises after ten seconds."""

    device: Any = None

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier
        self.log = CollectiveLog()

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(sum(column)) for column in zip(*self.gather(list(values)), strict=True)]

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def barrier(self) -> None:
        self._barrier.wait(10)

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self.barrier()
        values = list(self._slots)
        self.barrier()
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def on_ranks(size: int, act: Callable[[ThreadWorld], T]) -> list[T | Exception]:
    """What `act` returned or raised on each rank."""
    slots, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> T | Exception:
        try:
            return act(ThreadWorld(rank, size, slots, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
