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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dstrain.data.decode import (
    BOM,
    check_record,
    decode_json,
    decode_record,
    decode_text,
    is_blank,
    is_utf16,
    may_hold_halves,
)
from dstrain.data.parquet import Parquet
from dstrain.data.rows import BadRow, Rows, Source, show_path
from dstrain.errors import DataError


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


class JsonList(Rows):
    """A JSON list of objects, or an object with such a list under `data`. Held in memory."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(show_path(path), path.parent, columns)
        with _open(path) as file:
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


def _open(path: Path) -> BinaryIO:
    """The file's bytes, to be read at any place. What is packed is unpacked beside, into a file that has no name."""
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    try:
        plain = tempfile.TemporaryFile()  # noqa: SIM115  it is open as long as the source is
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, plain, 1 << 20)
        plain.flush()
        plain.seek(0)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise DataError(
            f"{show_path(path)}: gzip file is incomplete or damaged ({fault}); download it again"
        ) from fault
    except OSError as fault:
        place = tempfile.gettempdir()
        mend = "set TMPDIR to a folder with room, or unpack it yourself"
        raise DataError(f"{show_path(path)} cannot be unpacked into {place}: {fault}; {mend}") from fault
    return plain
