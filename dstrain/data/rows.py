"""What every kind of source shares: its records by index, the bad ones by name, and renamed columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
    """Relative to the working folder where the file is inside it, as it was given elsewhere."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)
