"""Room on the disk for checkpoints: asked before training and before each save."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import CheckpointError
from dstrain.train.checkpoint.checkpoints import CheckpointStore, list_superseded, remove_checkpoint
from dstrain.train.checkpoint.select import read_best_name
from dstrain.train.state.manifest import find_checkpoints, find_latest_complete, get_folder_size
from dstrain.units import format_bytes

SIZE_MARGIN = 1.02
"""For headers, manifest and what other files of the run grow by."""


@dataclass(frozen=True)
class DiskForecast:
    """What a run's checkpoints will take."""

    checkpoint_size: int
    """Bytes of one."""
    max_checkpoints: int
    """Most that lie there at the same time, the one being written among them."""
    free_bytes: int
    """Bytes free now."""

    @property
    def needed_bytes(self) -> int:
        return self.checkpoint_size * self.max_checkpoints

    def __str__(self) -> str:
        most = f"at most {self.max_checkpoints} at a time take {format_bytes(self.needed_bytes)}"
        return (
            f"checkpoints: {format_bytes(self.checkpoint_size)} each, {most}; {format_bytes(self.free_bytes)} are free"
        )


def compute_max_checkpoints(num_saves: int, keep: int | None, intervals: tuple[int, int | None]) -> int:
    """Checkpoints that lie there at the same time: the kept, the best, the one being written, and each K-th.

    `saves`: of the whole run; `every`: (steps between saves, steps between those kept for good).
    """
    between, for_good = intervals
    lasting = 0 if for_good is None else num_saves * between // for_good
    kept = num_saves if keep is None else min(num_saves, keep + lasting + 1)
    return min(num_saves, kept + 1)


def check_disk_space(forecast: DiskForecast, folder: Path, prune_when_full: bool) -> str | None:
    """A warning where the disk will be full one day. Raises CheckpointError where not one checkpoint fits."""
    if forecast.checkpoint_size > forecast.free_bytes:
        raise CheckpointError(
            f"a checkpoint takes {format_bytes(forecast.checkpoint_size)}, and {folder} has {format_bytes(forecast.free_bytes)} free; "
            "free some, or put --run-dir on another disk"
        )
    if forecast.needed_bytes <= forecast.free_bytes or prune_when_full:
        return None
    fit = forecast.free_bytes // forecast.checkpoint_size
    aside = sum(get_folder_size(path) for path in list_superseded(folder))
    held = f"; superseded-* in {folder} take {format_bytes(aside)} until their steps are saved again" if aside else ""
    return (
        f"{forecast}: the {fit + 1}. would not fit; free some, put --run-dir on another disk, lower save.keep "
        f"to {max(1, fit - 2)} or set save.prune_when_full{held}"
    )


def ensure_disk_space(
    checkpoints: CheckpointStore, num_bytes: int, prune_when_full: bool, log_event: Callable[..., None]
) -> None:
    """See that about `size` bytes fit before anything is written. Raises CheckpointError on every rank. Collective.

    Nothing is removed for it but with `prune_when_full`, and never the newest whole checkpoint.
    """
    for name in checkpoints.run_on_rank_zero(
        "making room", lambda: _ensure_disk_space(checkpoints.folder, num_bytes, prune_when_full)
    ):
        log_event("checkpoint_removed", checkpoint=name, why="the disk is full, and save.prune_when_full is set")


def _ensure_disk_space(folder: Path, num_bytes: int, prune_when_full: bool) -> list[str]:
    newest = find_latest_complete(folder)
    needed = int((newest.size if newest else num_bytes) * SIZE_MARGIN)
    removed: list[str] = []
    if prune_when_full and get_free_bytes(folder) < needed:
        removed = _prune_until_free(folder, needed)
    if (free := get_free_bytes(folder)) < needed:
        mend = "free some" if prune_when_full else "free some, lower save.keep or set save.prune_when_full"
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {format_bytes(needed)}, and {folder} has {format_bytes(free)} free: {mend}",
        )
    return removed


def _prune_until_free(folder: Path, needed_bytes: int) -> list[str]:
    """Remove what was set aside, then older checkpoints, the best last, until so many bytes are free; their names."""
    there, removed = [info for info in find_checkpoints(folder) if info.is_complete], []
    best = read_best_name(folder)
    older = sorted(there[1:], key=lambda info: (info.path.name == best, info.step))
    for path in [*list_superseded(folder), *(info.path for info in older)]:
        if get_free_bytes(folder) >= needed_bytes:
            break
        remove_checkpoint(path)
        removed.append(path.name)
    return removed


def get_free_bytes(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(place).free
