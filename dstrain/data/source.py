"""Data files as sequences of records: jsonl, json and parquet, and several of them joined."""

from __future__ import annotations

import bisect
import difflib
import hashlib
import itertools
import json
import os
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dstrain.data.decode import check_record, decode_record, is_blank, may_hold_halves
from dstrain.errors import DataError, Fault, did_you_mean


class BadRow(NamedTuple):
    """A record that cannot be used: where it stands and why."""

    where: str
    reason: str


class Source(Protocol):
    """Records by index. Only rows that decode are counted; the others are in `bad`."""

    digest: str
    """Hash of the file's bytes and of the renaming: equal digests give equal records."""
    bad: list[BadRow]
    """The rows that are no record at all."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """`train.jsonl:12`, for messages."""

    def folder_of(self, index: int) -> Path:
        """The folder that relative paths in this record start from."""


class FileSource:
    """What the three file formats share."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self.path, self.folder, self.columns = path, path.parent, dict(columns)
        self.name = show_path(path)
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


class JsonLines(FileSource):
    """One JSON object per line, read by offset: nothing but the index stays in memory. Thread-safe."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        self._offsets, self._sizes, self._lines = array("q"), array("q"), array("q")
        self._file = path.open("rb")
        self._lock = threading.Lock()
        self._settle(*self._index())

    def _index(self) -> tuple[str, set[str]]:
        content, names, offset = hashlib.sha256(), set[str](), 0
        for number, line in enumerate(self._file, 1):
            content.update(line)
            if not is_blank(line):
                try:
                    names.update(decode_record(line))
                    self._offsets.append(offset)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                except ValueError as fault:
                    self.bad.append(BadRow(f"{self.name}:{number}", str(fault)))
            offset += len(line)
        return content.hexdigest(), names

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        offset, size = self._offsets[index], self._sizes[index]
        try:
            return self._rename(decode_record(self._read(offset, size)))
        except ValueError as fault:
            problem = f"{self.where(index)}: the file was changed while it was in use ({fault}); start again"
            raise DataError(problem) from fault

    def _read(self, offset: int, size: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), size, offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"


class JsonList(FileSource):
    """A JSON list of objects, or an object with such a list under `data`. Held in memory."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        content = path.read_bytes()
        rows, suspect = self._load(content)
        self._rows: list[tuple[int, dict[str, Any]]] = []
        for index, row in enumerate(rows):
            try:
                self._rows.append((index, check_record(row, suspect)))
            except ValueError as fault:
                self.bad.append(BadRow(f"{self.name}[{index}]", str(fault)))
        names = {name for _, row in self._rows for name in row}
        self._settle(hashlib.sha256(content).hexdigest(), names)

    def _load(self, content: bytes) -> tuple[list[Any], bool]:
        try:
            text = content.decode("utf-8-sig")
            value = json.loads(text)
        except UnicodeDecodeError as fault:
            raise DataError(f"{self.name} is not UTF-8 (byte {fault.start}); save it as UTF-8") from fault
        except (ValueError, RecursionError) as fault:
            mend = "name it .jsonl if it has one object per line" if "Extra data" in str(fault) else "mend the file"
            raise DataError(f"{self.name} is no JSON: {fault}; {mend}") from fault
        rows = value.get("data") if isinstance(value, dict) else value
        if not isinstance(rows, list):
            raise DataError(f'{self.name} holds no list of records; write [{{…}}, …] or {{"data": [{{…}}, …]}}')
        if not rows:
            raise DataError(f"{self.name} has no records; its list is empty")
        return rows, may_hold_halves(text)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rename(self._rows[index][1])

    def where(self, index: int) -> str:
        """`train.json[12]`: the place in the list, from 0."""
        return f"{self.name}[{self._rows[index][0]}]"


class Parquet(FileSource):
    """The rows of a parquet file. The table is held in memory."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as fault:
            raise DataError(f'{self.name} needs pyarrow; run pip install "dstrain[parquet]"') from fault
        try:
            self._table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as fault:
            raise DataError(f"{self.name} is no parquet file: {fault}; write it again") from fault
        if not self._table.num_rows:
            raise DataError(f"{self.name} has no records; its table is empty")
        content = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
        self._settle(content.hexdigest(), set(self._table.column_names))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rename(self._table.slice(index, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        """`train.parquet[12]`: the row, from 0."""
        return f"{self.name}[{index}]"


class First:
    """The first so many records of a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, min(count, len(source))
        self.digest = hashlib.sha256(f"{source.digest} {count}".encode()).hexdigest()
        self.bad = source.bad

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._source[index]

    def where(self, index: int) -> str:
        return self._source.where(index)

    def folder_of(self, index: int) -> Path:
        return self._source.folder_of(index)


class Joined:
    """Several sources, one after another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self.sizes = tuple(len(source) for source in self.sources)
        self._ends = list(itertools.accumulate(self.sizes))
        self.digest = hashlib.sha256(" ".join(source.digest for source in self.sources).encode()).hexdigest()
        self.bad = [row for source in self.sources for row in source.bad]

    def locate(self, index: int) -> tuple[Source, int]:
        """The source that holds the record, and the record's index there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        return self.sources[which], index - self._ends[which] + self.sizes[which]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, inside = self.locate(index)
        return source[inside]

    def where(self, index: int) -> str:
        source, inside = self.locate(index)
        return source.where(inside)

    def folder_of(self, index: int) -> Path:
        source, inside = self.locate(index)
        return source.folder_of(inside)


_KINDS: dict[str, type[JsonLines] | type[JsonList] | type[Parquet]] = {
    ".jsonl": JsonLines,
    ".json": JsonList,
    ".parquet": Parquet,
}


def open_source(path: str | Path, columns: Mapping[str, str] | None = None) -> JsonLines | JsonList | Parquet:
    """The records of a .jsonl, .json or .parquet file; `columns` renames file names to names the format knows."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(_missing(path))
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{show_path(path)} ends in '{path.suffix}'; data files end in .jsonl, .json or .parquet")
    if not path.stat().st_size:
        raise DataError(f"{show_path(path)} is empty; write it again")
    source = kind(path, columns or {})
    if not len(source) and not source.bad:
        raise DataError(f"{show_path(path)} has no records, only blank lines; write it again")
    return source


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name a .jsonl, .json or .parquet file in it"
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    mend = f"near it: {', '.join(near)}" if near else f"{folder} has none like it, or does not exist"
    return f"there is no file {path} (looked from {Path.cwd()}); {mend}"


def show_path(path: Path) -> str:
    """Relative to the working folder where the file is inside it, as it was given elsewhere."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)
