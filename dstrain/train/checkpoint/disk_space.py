"""Room on the disk for checkpoints: asked before training and before each save."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import CheckpointError
from dstrain.train.checkpoint.checkpoints import Checkpoints, discard, superseded
from dstrain.train.checkpoint.select import best_name
from dstrain.train.state.manifest import bytes_in, listed, newest_whole
from dstrain.units import show_bytes

MARGIN = 1.02
"""For headers, manifest and what other files of the run grow by."""


@dataclass(frozen=True)
class Forecast:
    """What a run's checkpoints will take."""

    each: int
    """Bytes of one."""
    at_once: int
    """Most that lie there at the same time, the one being written among them."""
    free: int
    """Bytes free now."""

    @property
    def needed(self) -> int:
        return self.each * self.at_once

    def __str__(self) -> str:
        most = f"at most {self.at_once} at a time take {show_bytes(self.needed)}"
        return f"checkpoints: {show_bytes(self.each)} each, {most}; {show_bytes(self.free)} are free"


def most_at_once(saves: int, keep: int | None, every: tuple[int, int | None]) -> int:
    """Checkpoints that lie there at the same time: the kept, the best, the one being written, and each K-th.

    `saves`: of the whole run; `every`: (steps between saves, steps between those kept for good).
    """
    between, for_good = every
    lasting = 0 if for_good is None else saves * between // for_good
    kept = saves if keep is None else min(saves, keep + lasting + 1)
    return min(saves, kept + 1)


def check_room(forecast: Forecast, folder: Path, prune_when_full: bool) -> str | None:
    """A warning where the disk will be full one day. Raises CheckpointError where not one checkpoint fits."""
    if forecast.each > forecast.free:
        raise CheckpointError(
            f"a checkpoint takes {show_bytes(forecast.each)}, and {folder} has {show_bytes(forecast.free)} free; "
            "free some, or put --run-dir on another disk"
        )
    if forecast.needed <= forecast.free or prune_when_full:
        return None
    fit = forecast.free // forecast.each
    aside = sum(bytes_in(path) for path in superseded(folder))
    held = f"; superseded-* in {folder} take {show_bytes(aside)} until their steps are saved again" if aside else ""
    return (
        f"{forecast}: the {fit + 1}. would not fit; free some, put --run-dir on another disk, lower save.keep "
        f"to {max(1, fit - 2)} or set save.prune_when_full{held}"
    )


def make_room(checkpoints: Checkpoints, size: int, prune_when_full: bool, tell: Callable[..., None]) -> None:
    """See that about `size` bytes fit before anything is written. Raises CheckpointError on every rank. Collective.

    Nothing is removed for it but with `prune_when_full`, and never the newest whole checkpoint.
    """
    for name in checkpoints.on_first("making room", lambda: _make_room(checkpoints.folder, size, prune_when_full)):
        tell("checkpoint_removed", checkpoint=name, why="the disk is full, and save.prune_when_full is set")


def _make_room(folder: Path, size: int, prune_when_full: bool) -> list[str]:
    newest = newest_whole(folder)
    needed = int((newest.size if newest else size) * MARGIN)
    removed: list[str] = []
    if prune_when_full and free_bytes(folder) < needed:
        removed = _prune_until(folder, needed)
    if (free := free_bytes(folder)) < needed:
        mend = "free some" if prune_when_full else "free some, lower save.keep or set save.prune_when_full"
        raise OSError(
            errno.ENOSPC, f"a checkpoint takes {show_bytes(needed)}, and {folder} has {show_bytes(free)} free: {mend}"
        )
    return removed


def _prune_until(folder: Path, needed: int) -> list[str]:
    """Remove what was set aside, then older checkpoints, the best last, until so many bytes are free; their names."""
    there, removed = [info for info in listed(folder) if info.whole], []
    best = best_name(folder)
    older = sorted(there[1:], key=lambda info: (info.path.name == best, info.step))
    for path in [*superseded(folder), *(info.path for info in older)]:
        if free_bytes(folder) >= needed:
            break
        discard(path)
        removed.append(path.name)
    return removed


def free_bytes(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(place).free
