"""Save when it is due: interval, signal, disk space."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch

from dstrain.batch import Progress
from dstrain.distributed.collective_log import CollectiveLog
from dstrain.errors import CheckpointError
from dstrain.process_setup import log_stdout
from dstrain.report.observe import observing
from dstrain.schedule import EarlyStopping
from dstrain.training.checkpoints import CheckpointStore, find_best, list_old_versions, remove_checkpoint
from dstrain.training.copies import RunCopy
from dstrain.training.engine.base import Engine
from dstrain.training.health.signals import GracePeriod
from dstrain.training.state.files import StateFile, write_state
from dstrain.training.state.manifest import FileEntry, find_checkpoints, find_latest_complete, get_folder_size
from dstrain.units import format_bytes

SIZE_MARGIN = 1.02
"""Factor for headers, the manifest and other files of the run."""


def compute_max_checkpoints(num_saves: int, keep: int | None, every: int | Fraction, keep_every: int | None) -> int:
    """Return the largest number of checkpoints at a time: the kept, the best, the one being written, and multiples.

    `num_saves` is that of the whole run, `every` the steps between two.
    """
    multiples = 0 if keep_every is None else int(num_saves * every // keep_every)
    kept = num_saves if keep is None else min(num_saves, keep + multiples + 1)
    return min(num_saves, kept + 1)


def check_disk_space(size: int, count: int, free: int | None, folder: Path, prune_when_full: bool) -> str | None:
    """Return a warning if `count` checkpoints of `size` bytes do not fit into `free` bytes; None: not known.

    Raises CheckpointError if not even one does.
    """
    if free is None:
        return None
    if size > free:
        raise CheckpointError(
            f"a checkpoint takes {format_bytes(size)}, and {folder} has {format_bytes(free)} free; "
            "free some, or put --run-dir on another disk"
        )
    if size * count <= free or prune_when_full:
        return None
    fit = free // size
    superseded = sum(get_folder_size(path) for path in list_old_versions(folder))
    held = (
        f"; superseded-* in {folder} take {format_bytes(superseded)} until their steps are saved again"
        if superseded
        else ""
    )
    return (
        f"checkpoints: {format_bytes(size)} each, at most {count} at a time take {format_bytes(size * count)}; "
        f"{format_bytes(free)} are free: no. {fit + 1} would not fit; free some, put --run-dir on another disk, lower "
        f"save.keep to {max(1, fit - 2)} or set save.prune_when_full{held}"
    )


def ensure_disk_space(
    checkpoints: CheckpointStore, num_bytes: int, prune_when_full: bool, log_event: Callable[..., None]
) -> None:
    """Check that about `num_bytes` fit before anything is written. Raises CheckpointError on every rank. Collective.

    Only with `prune_when_full` older checkpoints are removed for it, and never the newest complete one.
    """
    removed: list[str] = []
    hint = f"the newest complete checkpoint in {checkpoints.folder} is unchanged: fix the cause and start again"
    try:
        checkpoints.try_twice(
            lambda _: checkpoints.run_on_rank_zero(
                "making room",
                lambda: _ensure_disk_space(checkpoints.folder, num_bytes, prune_when_full, removed),
                hint if prune_when_full else "",
            )
        )
    finally:
        for name in removed:
            log_event("checkpoint_removed", checkpoint=name, why="the disk is full, and save.prune_when_full is set")


def _ensure_disk_space(folder: Path, num_bytes: int, prune_when_full: bool, removed: list[str]) -> None:
    """`removed` gets the names of the checkpoints that are removed."""
    newest = find_latest_complete(folder)
    # The size of a real checkpoint is better than the estimate.
    needed = int((newest.size if newest else num_bytes) * SIZE_MARGIN)
    if prune_when_full and not has_room(folder, needed):
        _prune_until_free(folder, needed, removed)
    if not has_room(folder, needed):
        free = get_free_bytes(folder) or 0
        fix = "free some" if prune_when_full else "free some, lower save.keep or set save.prune_when_full"
        # As if the disk had refused the write; run_on_rank_zero makes it a CheckpointError on all ranks.
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {format_bytes(needed)}, and {folder} has {format_bytes(free)} free: {fix}",
        )


def _prune_until_free(folder: Path, needed_bytes: int, removed: list[str]) -> None:
    """Remove superseded, then older checkpoints, the best last, until enough is free; add their names to `removed`."""
    complete = [info for info in find_checkpoints(folder) if info.is_complete]
    best = find_best(folder)
    older = sorted(complete[1:], key=lambda info: (best is not None and info.path == best.path, info.step))
    for path in [*list_old_versions(folder), *(info.path for info in older)]:
        if has_room(folder, needed_bytes):
            break
        if remove_checkpoint(path):
            removed.append(path.name)


def get_free_bytes(folder: Path) -> int | None:
    """Return the free bytes on the disk of a folder that may not exist yet; None where the file system tells none."""
    with observing("shutil.disk_usage"):
        # The folder is created with the first checkpoint.
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        usage = shutil.disk_usage(existing)
        return usage.free if usage.total else None  # some network file systems say 0 of 0
    return None


def has_room(folder: Path, num_bytes: int) -> bool:
    """Return False if the bytes are known not to fit on the disk of a folder: where nothing is known, a write tells."""
    free = get_free_bytes(folder)
    return free is None or free >= num_bytes


COPY_POLL_SECONDS = 0.2
_WARNINGS = {
    "save_retried": "a save failed, and was tried again: {why}",
    "cleanup_failed": "{checkpoint} is saved, but older checkpoints could not all be removed, or `best` not be set "
    "({why}); the next save tries again",
}
HOST_MEMORY_FRACTION = 0.9
"""Fraction of free host memory that copies may take."""


@dataclass(kw_only=True)
class CheckpointSaver:
    """Writer of checkpoints, synchronous or asynchronous. At most one save is running; the next one waits for it."""

    checkpoints: CheckpointStore
    """Has a process group of its own if saves are asynchronous."""
    engine: Engine
    run_info: Mapping[str, Any]
    """Fields of run.json: preset, stage, versions."""
    log_event: Callable[..., None]
    """Writes an event."""
    checkpoint_size: int
    """Approximate size of a checkpoint in bytes."""
    background: bool = False
    is_state_on_nvme: bool = False
    """True if optimizer state is on NVMe: saves are synchronous, since training would change it there."""
    prune_when_full: bool = False
    local_world_size: int = 1
    """Ranks of this host, which share its memory."""
    grace: GracePeriod = field(default_factory=lambda: GracePeriod(None))
    """Gets the duration of each save."""
    copy: RunCopy | None = None
    """`save.copy_to`, on rank 0."""
    early_stopping: EarlyStopping | None = None
    """Its state is a field of run.json."""
    saved_step: int | None = field(default=None, init=False)
    """Step of the newest checkpoint that this process has written."""
    _async_save: _AsyncSave | None = field(default=None, init=False)
    _host_buffers: _HostBuffers = field(default_factory=lambda: _HostBuffers(), init=False)
    _timings: dict[str, float] = field(default_factory=dict, init=False)
    _reason_logged: bool = field(default=False, init=False)

    def save(self, progress: Progress, metric: float | None, is_last: bool = False) -> None:
        """Write a checkpoint, or start to; with `is_last` it is complete on return. Raises CheckpointError. Collective."""
        start = time.perf_counter()
        # One save at a time: a running one reads the host buffers.
        self.wait()
        ensure_disk_space(self.checkpoints, self.checkpoint_size, self.prune_when_full, self.log_event)
        # Read now: the counters go on while a background save is written.
        about = self.engine.state_metadata() if self.engine.world.rank == 0 else None
        run_info = dict(self.run_info)
        if self.early_stopping is not None:
            run_info["early_stopping"] = self.early_stopping.state_dict()
        if not self._can_save_async(is_last):

            def write_from_engine(folder: Path) -> dict[str, FileEntry]:
                state_files = _with_progress(self.engine.state_files(), self.engine.world.log)
                return write_state(folder, state_files, about)

            folder = self.checkpoints.save(write_from_engine, progress, run_info, metric)
            seconds = time.perf_counter() - start
            self._log_saved(progress, folder, seconds, seconds)
            return
        copies = self._host_buffers.copy_files(self.engine.state_files(), self.engine.world.device)
        write = partial(write_state, state_files=copies, metadata=about)
        self._async_save = _AsyncSave(
            partial(self.checkpoints.save, write, progress, run_info, metric), progress, start
        )

    def wait(self) -> None:
        """Wait for a running save. Raises its error on every rank. Collective."""
        flight, self._async_save = self._async_save, None
        if flight is not None:
            flight.thread.join()
            if flight.error is not None:
                raise flight.error
            assert flight.folder is not None
            self._log_saved(flight.progress, flight.folder, flight.blocked_seconds, flight.total_seconds)

    def poll(self, failed: float, writing: float) -> None:
        """Commit a background save once every rank has written it. Collective where it is committed.

        `failed`, `writing`: on how many ranks `has_failed`, `is_writing`. All ranks have to agree, since `wait` is
        collective: a rank that still writes would hold up the others. Raises on every rank an error that kept any rank
        from writing it.
        """
        if self._async_save is not None and (failed or not writing):
            self.wait()
        self._log_copies()

    def wait_for_copies(self) -> None:
        """Wait until the newest checkpoint is copied. Collective, so that the other ranks notice an end of rank 0."""
        is_first = True
        while self.engine.world.any(self.copy is not None and bool(self.copy.in_use)):
            if is_first and self.copy is not None:
                log_stdout(f"copying the last checkpoint to {self.copy.place}")
            is_first = False
            self.engine.world.log.record_progress()
            time.sleep(COPY_POLL_SECONDS)
        self._log_copies()

    def _log_copies(self) -> None:
        for event, fields in self.copy.pop_outcomes() if self.copy is not None else ():
            self.log_event(event, **fields)
            if event == "copy_failed":
                log_stdout(f"warning: {fields['checkpoint']} was not copied to {fields['to']}: {fields['why']}")

    @property
    def is_writing(self) -> bool:
        """True while an asynchronous save has not ended on this rank."""
        return self._async_save is not None and self._async_save.thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """True if an asynchronous save has failed on this rank."""
        return self._async_save is not None and self._async_save.error is not None

    def pop_timings(self) -> dict[str, float]:
        """Return the metrics of saves since the last call: seconds that training waited, and in total."""
        spent, self._timings = self._timings, {}
        return spent

    def _log_saved(self, progress: Progress, folder: Path, blocked_seconds: float, total_seconds: float) -> None:
        self.saved_step = progress.step
        for event, fields in self.checkpoints.pop_events():
            self.log_event(event, **fields)
            log_stdout(f"warning: {_WARNINGS[event].format(**fields)}")
        for name, value in (("save_stall_seconds", blocked_seconds), ("save_seconds", total_seconds)):
            self._timings[name] = self._timings.get(name, 0.0) + value
        self.grace.record_save(total_seconds + (self.copy.seconds if self.copy else 0.0))
        if self.copy:
            self.copy.request(folder.name)
        self.log_event(
            "saved",
            step=progress.step,
            checkpoint=folder.name,
            stall_seconds=round(blocked_seconds, 4),
            seconds=round(total_seconds, 4),
        )

    def _can_save_async(self, is_last: bool) -> bool:
        """Return true if this save can be asynchronous; log once why not. Collective if `background`."""
        if not self.background or is_last:
            return False
        needed = self.checkpoint_size * self.local_world_size // self.engine.world.size
        available = 0
        with observing("psutil.virtual_memory"):
            available = psutil.virtual_memory().available
        # The buffers of the last save are reused, so they count as free.
        free = HOST_MEMORY_FRACTION * available + self._host_buffers.nbytes * self.local_world_size
        if self.engine.world.any(self.is_state_on_nvme or needed > free):
            where = f"a copy of {format_bytes(needed)} does not fit into host memory, {format_bytes(free)} are free"
            why = "the optimizer's state is on a disk" if self.is_state_on_nvme else where
            if not self._reason_logged:
                self.log_event("async_save_unavailable", why=why)
            self._reason_logged = True
            return False
        return True


def _with_progress(state_files: Iterable[StateFile], log: CollectiveLog) -> Iterator[StateFile]:
    """Yield the files, recording progress for each, so that a long save does not look like a stalled run."""
    for state_file in state_files:
        log.record_progress()
        yield state_file


class _AsyncSave:
    """Save that runs in a thread while training continues."""

    def __init__(self, write: Callable[[], Path], progress: Progress, start_time: float) -> None:
        self.progress, self.blocked_seconds, self.total_seconds = progress, time.perf_counter() - start_time, 0.0
        self.folder: Path | None = None
        self.error: Exception | None = None
        self._write, self._start_time = write, start_time
        self.thread = Thread(target=self._run, name="saving", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.folder = self._write()
        except Exception as error:  # raised by `wait` in the training thread
            self.error = error
        self.total_seconds = time.perf_counter() - self._start_time


class _HostBuffers:
    """Buffers in host memory, reused by every save; pinned for values from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Total size of the buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def copy_files(self, state_files: Iterable[StateFile], device: torch.device) -> list[StateFile]:
        """Return the files with copies of their values, which training does not change."""
        old, self._buffers = self._buffers, {}
        copied = [
            StateFile(
                shard.name,
                [(name, self._copy_tensor(old, name, values)) for name, values in shard.tensors],
                shard.scalars,
            )
            for shard in state_files
        ]
        if device.type == "cuda":
            # The copies from the GPU are asynchronous, and the next step changes their sources.
            torch.cuda.synchronize(device)
        return copied

    def _copy_tensor(self, old_buffers: Mapping[str, torch.Tensor], name: str, values: torch.Tensor) -> torch.Tensor:
        buffer = old_buffers.get(name)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            # Pinned memory is what makes a copy from the GPU asynchronous.
            buffer = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._buffers[name] = buffer
        return buffer.copy_(values.detach(), non_blocking=True)
