"""Kernels that DeepSpeed compiles at their first use: a build that was killed leaves a lock on which later ones wait for ever."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

STALE_SECONDS = 15 * 60
"""A lock that no process of this host holds may be that of another host which shares the folder: it is given this long."""


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Where torch keeps what it compiles."""
    if folder := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder).expanduser()
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "torch_extensions"


def settle_build_locks(folder: Path) -> Iterator[str]:
    """Remove the locks of dead builds; a sentence for each, and for each that may be one.

    torch makes the file `lock` beside a build, holds it open while it compiles, and waits without end where it is there
    (torch/utils/file_baton.py).
    """
    with contextlib.suppress(OSError, RuntimeError):
        found = [path for pattern in ("*/lock", "*/*/lock") for path in folder.glob(pattern)]
        for lock in found and sorted(set(found) - _held(found)):
            age = time.time() - lock.stat().st_mtime
            if age > STALE_SECONDS:
                lock.unlink()
                yield f"removed {lock}: a compilation that was killed had left it, and later ones would wait for it"
            else:
                yield f"{lock}: no process here holds it; if no other host is compiling, remove it, or this run waits for it"


def _held(locks: list[Path]) -> set[Path]:
    """Those that a process of this host has open."""
    wanted = {str(lock.resolve()): lock for lock in locks}
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if found := wanted.get(os.readlink(link)):
                held.add(found)
    return held
