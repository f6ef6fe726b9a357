"""Paths in messages, and files opened without waiting for devices."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def display_path(path: Path) -> str:
    """Relative to the working folder where the file is inside it, as it was given elsewhere.

    A path that nothing can be read from has a name too: a loop of links, a zero byte.
    """
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath(os.getcwd())))
    except (OSError, ValueError):
        return str(path)


NOT_REGULAR = "is no regular file"


def open_regular_file(path: Path) -> BinaryIO:
    """A regular file, open to be read. Never waits for a writer, as opening a FIFO does, and opens no device.

    Raises OSError: IsADirectoryError for a folder, one with NOT_REGULAR for what is neither.
    """
    _check_regular_file(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_regular_file(os.fstat(descriptor).st_mode)  # where it was exchanged meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_regular_file(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(NOT_REGULAR)


def not_file_reason(path: Path) -> str:
    """Why a path that has an entry is no file that can be read; empty where there is no entry, or it is a file or a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError as fault:
        if fault.errno == errno.ELOOP:
            return "is a link that leads back to itself"
        return f"is a link to {os.readlink(path)}, which is not there" if os.path.islink(path) else ""
    except ValueError:  # a zero byte in it
        return ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else NOT_REGULAR
