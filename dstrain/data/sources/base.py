"""What every kind of source shares: its records by index, the bad ones by name, and renamed columns."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from dstrain.errors import DataError, Fault, did_you_mean


class BadRow(NamedTuple):
    """A record that cannot be used: where it stands and why."""

    where: str
    reason: str


class Source(Protocol):
    """Records by index. Only rows that decode are counted; the others are in `bad`."""

    digest: str
    """Hash of the data and of the renaming: equal digests give equal records."""

    @property
    def bad(self) -> list[BadRow]:
        """The rows that are no record at all."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """`train.jsonl:12`, for messages."""

    def folder_of(self, index: int) -> Path:
        """The folder that relative paths in this record start from."""


class Rows:
    """A source with a name of its own, a folder, and names of columns to change."""

    def __init__(self, name: str, folder: Path, columns: Mapping[str, str]) -> None:
        self.name, self.folder, self.columns = name, folder, dict(columns)
        self.bad: list[BadRow] = []
        self.digest = ""

    def folder_of(self, index: int) -> Path:
        return self.folder

    def _settle(self, content: str, names: set[str]) -> None:
        """Fix the digest, and refuse to rename columns that no record has."""
        renaming = json.dumps(sorted(self.columns.items()))
        self.digest = hashlib.sha256(f"{content} {renaming}".encode()).hexdigest() if self.columns else content
        missing = [name for name in self.columns if name not in names] if names else []
        if missing:
            raise DataError(
                Fault(f"data.columns.{name}", f"no record of {self.name} has the column '{name}'", mend)
                for name, mend in ((name, did_you_mean(name, sorted(names))) for name in missing)
            )

    def _rename(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return record
        kept = {name: value for name, value in record.items() if name not in self.columns}
        return kept | {new: record[old] for old, new in self.columns.items() if old in record}


def show_path(path: Path) -> str:
    """Relative to the working folder where the file is inside it, as it was given elsewhere.

    A path that nothing can be read from has a name too: a loop of links, a zero byte.
    """
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath(os.getcwd())))
    except (OSError, ValueError):
        return str(path)


NOT_REGULAR = "is no regular file"


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open to be read. Never waits for a writer, as opening a FIFO does, and opens no device.

    Raises OSError: IsADirectoryError for a folder, one with NOT_REGULAR for what is neither.
    """
    _require_regular(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_regular(os.fstat(descriptor).st_mode)  # where it was exchanged meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _require_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(NOT_REGULAR)


def why_no_file(path: Path) -> str:
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
