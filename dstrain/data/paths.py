"""Paths in messages, and files opened without waiting for devices."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def display_path(path: Path) -> str:
    """Return the path for a message: relative if it is inside the working folder, else as given.

    Paths that cannot be read are displayed too, such as a loop of links or one with a null byte.
    """
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath(os.getcwd())))
    except (OSError, ValueError):
        return str(path)


NOT_REGULAR = "is not a regular file"


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Never opens a device and never waits for a writer, as opening a FIFO would. Raises OSError:
    IsADirectoryError for a folder, with the text NOT_REGULAR for other kinds.
    """
    _check_regular_file(os.stat(path).st_mode)
    # O_NONBLOCK: a FIFO that takes the place of the file would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_regular_file(os.fstat(descriptor).st_mode)  # it may have been replaced since the stat
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
    """Return why a path that exists is not a readable file.

    Empty if it does not exist, or is a file or a folder.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as fault:
        if fault.errno == errno.ELOOP:
            return "is a link that points to itself"
        return f"is a link to {os.readlink(path)}, which does not exist" if os.path.islink(path) else ""
    except ValueError:  # a null byte in the path
        return ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else NOT_REGULAR
