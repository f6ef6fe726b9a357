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

from dstrain.errors import DataError, Fault, suggest_name


class BadRow(NamedTuple):
    """A record that cannot be used: where it stands and why."""

    location: str
    reason: str


class Source(Protocol):
    """Records by index. Only rows that decode are counted; the others are in `bad`."""

    digest: str
    """Hash of the data and of the renaming: equal digests give equal records."""

    @property
    def bad_rows(self) -> list[BadRow]:
        """The rows that are no record at all."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def location(self, index: int) -> str:
        """`train.jsonl:12`, for messages."""

    def get_base_dir(self, index: int) -> Path:
        """The folder that relative paths in this record start from."""


class BaseSource:
    """A source with a name of its own, a folder, and names of columns to change."""

    def __init__(self, name: str, base_dir: Path, columns: Mapping[str, str]) -> None:
        self.name, self.base_dir, self.columns = name, base_dir, dict(columns)
        self.bad_rows: list[BadRow] = []
        self.digest = ""

    def get_base_dir(self, index: int) -> Path:
        return self.base_dir

    def _set_digest(self, content_digest: str, column_names: set[str]) -> None:
        """Fix the digest, and refuse to rename columns that no record has."""
        renaming = json.dumps(sorted(self.columns.items()))
        self.digest = (
            hashlib.sha256(f"{content_digest} {renaming}".encode()).hexdigest() if self.columns else content_digest
        )
        missing = [name for name in self.columns if name not in column_names] if column_names else []
        if missing:
            raise DataError(
                Fault(f"data.columns.{name}", f"no record of {self.name} has the column '{name}'", mend)
                for name, mend in ((name, suggest_name(name, sorted(column_names))) for name in missing)
            )

    def _rename_columns(self, record: dict[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return record
        kept = {name: value for name, value in record.items() if name not in self.columns}
        return kept | {new: record[old] for old, new in self.columns.items() if old in record}


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
