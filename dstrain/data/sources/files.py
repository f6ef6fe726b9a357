"""The files that records come in: jsonl and json, packed with gzip or not, and parquet."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tempfile
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from dstrain.data.sources.base import BadRow, Rows, Source, show_path
from dstrain.data.sources.decode import (
    BOM,
    check_record,
    decode_json,
    decode_record,
    decode_text,
    is_blank,
    is_utf16,
    may_hold_halves,
)
from dstrain.data.sources.parquet import Parquet
from dstrain.errors import DataError
from dstrain.units import show_bytes

MOST_OF_DISK = 0.5
"""Share of the free room in TMPDIR that one packed file may fill: a megabyte can unpack to a thousand."""
LONGEST_LINE = 256 << 20
"""Bytes of a line; a record has some thousands."""
_AT_MOST = f"has {LONGEST_LINE >> 20} MiB at most; split the record, or name a file for what it holds"
LIST_COSTS = 3
"""Bytes of memory, at least, for a byte of a JSON list: as it is in the file, as text, and as objects."""


class JsonLines(Rows):
    """One JSON object per line, read by offset: nothing but the index stays in memory. Thread-safe."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(show_path(path), path.parent, columns)
        self._offsets, self._sizes, self._lines = array("q"), array("q"), array("q")
        self._file = _open(path)
        self._lock = threading.Lock()
        self._refuse_other_text()
        self._settle(*self._index())
        if self.bad:
            self._refuse_array()

    def _refuse_other_text(self) -> None:
        """Raise DataError for UTF-16, of which no line decodes."""
        head = self._file.read(2)
        self._file.seek(0)
        if is_utf16(head):
            raise DataError(f"{self.name} is UTF-16; save it as UTF-8")

    def _refuse_array(self) -> None:
        """Raise DataError where the lines are those of one array of objects."""
        self._file.seek(0)
        if not self._file.read(64).removeprefix(BOM).lstrip().startswith(b"["):
            return
        self._file.seek(0)
        with contextlib.suppress(ValueError, RecursionError):
            value = decode_json(decode_text(self._file.read()))
            if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
                raise DataError(f"{self.name} is one JSON array, not one object per line; name it .json")

    def _index(self) -> tuple[str, set[str]]:
        content, names, offset = hashlib.sha256(), set[str](), 0
        for number, (line, size) in enumerate(_lines(self._file, content.update), 1):
            if size > LONGEST_LINE:
                self.bad.append(BadRow(f"{self.name}:{number}", f"has {show_bytes(size)}, and a line {_AT_MOST}"))
            elif not is_blank(line):
                try:
                    names.update(decode_record(line))
                    self._offsets.append(offset)
                    self._sizes.append(len(line))
                    self._lines.append(number)
                except ValueError as fault:
                    self.bad.append(BadRow(f"{self.name}:{number}", str(fault)))
            offset += size
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


class JsonList(Rows):
    """A JSON list of objects, or an object with such a list under `data`. Held in memory."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(show_path(path), path.parent, columns)
        with _open(path) as file:
            _check_memory(self.name, os.fstat(file.fileno()).st_size)
            content = file.read()
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
            text = decode_text(content)
        except ValueError as fault:
            raise DataError(f"{self.name} {fault}") from fault
        try:
            value = decode_json(text)
        except (ValueError, RecursionError) as fault:
            mend = "name it .jsonl if it has one object per line" if "Extra data" in str(fault) else "fix the file"
            raise DataError(f"{self.name} is not valid JSON: {fault}; {mend}") from fault
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


KINDS: dict[str, Callable[[Path, Mapping[str, str]], Source]] = {
    ".jsonl": JsonLines,
    ".jsonl.gz": JsonLines,
    ".json": JsonList,
    ".json.gz": JsonList,
    ".parquet": Parquet,
}
"""The end of a file's name -> what reads it."""


def ending(name: str) -> str:
    """`.jsonl.gz` of `a.b.jsonl.gz`, `.csv` of `a.csv`, in small letters."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def _lines(file: BinaryIO, hash_bytes: Callable[[bytes], Any]) -> Iterator[tuple[bytes, int]]:
    """(a line, its bytes); of one longer than LONGEST_LINE only the beginning is held."""
    while line := file.readline(LONGEST_LINE + 1):
        hash_bytes(line)
        size, end = len(line), line
        while len(end) > LONGEST_LINE and not end.endswith(b"\n"):  # the rest of a long one, in pieces
            if not (end := file.readline(LONGEST_LINE + 1)):
                break
            hash_bytes(end)
            size += len(end)
        yield line, size


def _check_memory(name: str, size: int) -> None:
    """Raise DataError for a list that would not fit the memory: Python needs several bytes for each of a JSON text."""
    free = int(psutil.virtual_memory().available)
    if size * LIST_COSTS > free:
        problem = f"{name} has {show_bytes(size)}, is held in memory whole, and {show_bytes(free)} of that are free"
        raise DataError(f"{problem}; write one record per line (.jsonl), which is read line by line")


def _open(path: Path) -> BinaryIO:
    """The file's bytes, to be read at any place. What is packed is unpacked beside, into a file that has no name."""
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    place = tempfile.gettempdir()
    try:
        plain = tempfile.TemporaryFile()  # noqa: SIM115  it is open as long as the source is
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, _Bounded(plain, path, place), 1 << 20)
        plain.flush()
        plain.seek(0)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise DataError(
            f"{show_path(path)}: gzip file is incomplete or damaged ({fault}); download it again"
        ) from fault
    except OSError as fault:
        mend = "set TMPDIR to a folder with room, or unpack it yourself"
        raise DataError(f"{show_path(path)} cannot be unpacked into {place}: {fault}; {mend}") from fault
    return plain


class _Bounded:
    """A file that takes no more than its share of a disk. Raises DataError where more comes."""

    def __init__(self, plain: BinaryIO, path: Path, place: str) -> None:
        self._plain, self._path, self._place = plain, path, place
        self._left = self._most = int(shutil.disk_usage(place).free * MOST_OF_DISK)

    def write(self, piece: bytes) -> int:
        self._left -= len(piece)
        if self._left >= 0:
            return self._plain.write(piece)
        size, most = show_bytes(self._path.stat().st_size), show_bytes(self._most)
        problem = (
            f"{show_path(self._path)} has {size} and unpacks to more than {most}, half of what is free in {self._place}"
        )
        raise DataError(f"{problem}; set TMPDIR to a folder with room, or unpack it yourself")
