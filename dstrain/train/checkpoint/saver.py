"""When checkpoints are written: while training waits, or behind it from a copy in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch

from dstrain.batch import Progress
from dstrain.distributed.collective_log import LEDGER
from dstrain.train.checkpoint.checkpoints import Checkpoints
from dstrain.train.checkpoint.disk_space import make_room
from dstrain.train.engine.deepspeed import Engine
from dstrain.train.health.grace import Grace
from dstrain.train.state.files import Shard, write_state
from dstrain.units import show_bytes

SPARE = 0.9
"""Of the host memory that is free, the share that copies may take."""


@dataclass(kw_only=True)
class Saving:
    """Writes checkpoints. At most one is in flight; whoever comes next waits for it."""

    checkpoints: Checkpoints
    """With a process group of its own, where `background`."""
    engine: Engine
    record: Mapping[str, Any]
    """What each checkpoint says of the run: preset, stage, versions."""
    tell: Callable[..., None]
    """Writes an event."""
    size: int
    """Bytes of a checkpoint, about."""
    background: bool = False
    on_disk: bool = False
    """Whether the optimizer's state lies on a disk: training has to wait, as it would change there."""
    prune_when_full: bool = False
    processes_here: int = 1
    """Processes of this host, which share its memory."""
    grace: Grace = field(default_factory=lambda: Grace(None))
    """Hears how many seconds each checkpoint took."""
    _flight: _Flight | None = field(default=None, init=False)
    _copies: _Copies = field(default_factory=lambda: _Copies(), init=False)
    _spent: dict[str, float] = field(default_factory=dict, init=False)
    _told_why: bool = field(default=False, init=False)

    def save(self, progress: Progress, metric: float | None, last: bool = False) -> None:
        """Write a checkpoint, or begin to; with `last` it is there on return. Raises CheckpointError. Collective."""
        start = time.perf_counter()
        self.settle()
        make_room(self.checkpoints, self.size, self.prune_when_full, self.tell)
        about = self.engine.about() if self.engine.world.rank == 0 else None
        if not self._may_copy(last):
            write = partial(write_state, shards=_marked(self.engine.shards()), about=about)
            folder = self.checkpoints.save(write, progress, self.record, metric)
            seconds = time.perf_counter() - start
            self._tell_saved(progress, folder, seconds, seconds)
            return
        copies = self._copies.take(self.engine.shards(), self.engine.world.device)
        write = partial(write_state, shards=copies, about=about)
        self._flight = _Flight(partial(self.checkpoints.save, write, progress, self.record, metric), progress, start)

    def settle(self) -> None:
        """Wait for the checkpoint in flight. Raises on every rank what kept it from being written. Collective."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.thread.join()
            self._land(flight)

    @property
    def landed(self) -> bool:
        """Whether a checkpoint was in flight and is no more, well or not."""
        return self._flight is not None and not self._flight.thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that it could not be written."""
        return self._flight is not None and self._flight.error is not None

    def take_spent(self) -> dict[str, float]:
        """Seconds of saves since the last call, for metrics: that training waited, and in all."""
        spent, self._spent = self._spent, {}
        return spent

    def _land(self, flight: _Flight) -> None:
        if flight.error is not None:
            raise flight.error
        assert flight.folder is not None
        self._tell_saved(flight.progress, flight.folder, flight.stall, flight.seconds)

    def _tell_saved(self, progress: Progress, folder: Path, stall: float, seconds: float) -> None:
        for name, value in (("save_stall_seconds", stall), ("save_seconds", seconds)):
            self._spent[name] = self._spent.get(name, 0.0) + value
        self.grace.saved(seconds)
        self.tell(
            "saved",
            step=progress.step,
            checkpoint=folder.name,
            stall_seconds=round(stall, 4),
            seconds=round(seconds, 4),
        )

    def _may_copy(self, last: bool) -> bool:
        """Whether this save can go on behind training; says once why it cannot. Collective where `background`."""
        if not self.background or last:
            return False
        needed = self.size * self.processes_here // self.engine.world.size
        free = SPARE * psutil.virtual_memory().available + self._copies.size * self.processes_here
        if self.engine.world.any(self.on_disk or needed > free):
            where = f"a copy of {show_bytes(needed)} does not fit into host memory, {show_bytes(free)} are free"
            why = "the optimizer's state lies on a disk" if self.on_disk else where
            if not self._told_why:
                self.tell("save_waits", why=why)
            self._told_why = True
            return False
        return True


def _marked(shards: Iterable[Shard]) -> Iterator[Shard]:
    """The shards, each of them progress."""
    for shard in shards:
        LEDGER.mark()
        yield shard


class _Flight:
    """A checkpoint being written behind training."""

    def __init__(self, write: Callable[[], Path], progress: Progress, start: float) -> None:
        self.progress, self.stall, self.seconds = progress, time.perf_counter() - start, 0.0
        self.folder: Path | None = None
        self.error: Exception | None = None
        self._write, self._start = write, start
        self.thread = Thread(target=self._run, name="saving", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.folder = self._write()
        except Exception as error:  # raised where training asks for it
            self.error = error
        self.seconds = time.perf_counter() - self._start


class _Copies:
    """Buffers in host memory that are used again by every save; pinned where the values come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def take(self, shards: Iterable[Shard], device: torch.device) -> list[Shard]:
        """The same shards, with values that training does not change."""
        kept, self._buffers = self._buffers, {}
        found = [
            Shard(shard.name, [(name, self._copy(kept, name, values)) for name, values in shard.tensors], shard.numbers)
            for shard in shards
        ]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    def _copy(self, kept: Mapping[str, torch.Tensor], name: str, values: torch.Tensor) -> torch.Tensor:
        buffer = kept.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._buffers[name] = buffer
        return buffer.copy_(values.detach(), non_blocking=True)
