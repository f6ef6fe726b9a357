"""Removing and renaming folders where a network file system keeps what others have open, and may answer twice."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path


def clear_path(path: Path) -> None:
    """Free this name. What a reader has open stays on NFS, under a name that the next start removes."""
    if not remove_folder(path):
        name = path.name[path.name.index("step-") :].removesuffix(".partial")
        rename_folder(path, path.with_name(f"superseded-{time.time_ns()}-{name}.partial"))


def remove_folder(path: Path) -> bool:
    """Remove a folder; return False if NFS keeps a file (.nfs*) that a process has open. Raises OSError."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def rename_folder(path: Path, target: Path) -> None:
    """Rename a folder to a free name. An NFS client that repeats a request is told that `path` does not exist."""
    try:
        os.rename(path, target)
    except FileNotFoundError:
        if path.exists() or not target.exists():
            raise
