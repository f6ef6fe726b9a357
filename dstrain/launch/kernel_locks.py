"""Kernels that DeepSpeed compiles at their first use: a build that was killed leaves a lock on which later ones wait for ever."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Timer

STALE_LOCK_SECONDS = 15 * 60
"""A lock that no process of this host holds may be that of another host which shares the folder: it is given this long."""
LOCAL_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "apfs", "ntfs"}
"""File systems of one host, whose every process /proc shows. (Two containers of one host should not share the folder.)"""


def get_extensions_dir(environment: Mapping[str, str]) -> Path:
    """Where torch keeps what it compiles."""
    if folder := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder).expanduser()
    # As torch does it: a user without a home folder gets `~` itself, and no error.
    return Path(os.path.expanduser(environment.get("XDG_CACHE_HOME") or "~/.cache")) / "torch_extensions"


def remove_stale_locks(folder: Path) -> Iterator[str]:
    """Remove the locks of dead builds, at once or when they are old enough; a sentence for each.

    torch makes the file `lock` beside a build, holds it open while it compiles, and waits without end where it is there
    (torch/utils/file_baton.py).
    """
    with contextlib.suppress(OSError, RuntimeError):
        found = [path for pattern in ("*/lock", "*/*/lock") for path in folder.glob(pattern)]
        for lock in found and sorted(set(found) - _find_open_locks(found)):
            made = lock.stat().st_mtime
            left = 0.0 if _is_on_local_disk(lock) else made + STALE_LOCK_SECONDS - time.time()
            if left <= 0:
                lock.unlink()
                yield f"removed {lock}: a compilation that was killed had left it, and later ones would wait for it"
                continue
            yield (
                f"{lock}: no process here holds it. Another host may be compiling; if not, remove it, "
                f"or it is removed in {left:.0f} s"
            )
            later = Timer(left, _remove_if_unchanged, (lock, made))
            later.daemon = True
            later.start()


def _remove_if_unchanged(lock: Path, mtime: float) -> None:
    with contextlib.suppress(OSError):
        if lock.stat().st_mtime == mtime:
            lock.unlink()


def _is_on_local_disk(path: Path) -> bool:
    """Whether only this host sees the path."""
    import psutil

    mounts = {Path(found.mountpoint): found.fstype for found in psutil.disk_partitions(all=True)}
    return next((mounts[place] in LOCAL_FILESYSTEMS for place in path.resolve().parents if place in mounts), False)


def _find_open_locks(locks: list[Path]) -> set[Path]:
    """Those that a process of this host has open."""
    wanted = {str(lock.resolve()): lock for lock in locks}
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if found := wanted.get(os.readlink(link)):
                held.add(found)
    return held
