"""Files of records by line or table: JSONL, JSON, text, CSV, TS."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import threading
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from dstrain.data.sources.base import BaseSource, Columns, Source
from dstrain.data.sources.parquet import ParquetSource
from dstrain.errors import DataError, describe_decode_error, one_line
from dstrain.files import MAX_JSON_DEPTH, display_path, is_deep_json
from dstrain.units import format_bytes

BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_UTF16_PREFIXES = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0[")
"""First bytes of a JSON file in UTF-16, with a byte order mark or without."""
MAX_LINE_BYTES = 256 << 20
"""Maximum size of a line; a record usually has a few thousand bytes."""
_LINE_LIMIT_HINT = (
    f"has {MAX_LINE_BYTES >> 20} MiB at most; split the record, or store its content in a file and name that"
)
JSON_MEMORY_FACTOR = 3
"""Bytes of memory per byte of a JSON list, at least: the file's bytes, the text and the objects."""


def decode_text(content: bytes) -> str:
    """Return the text of a file. Raises ValueError with the reason if it is not UTF-8."""
    if content.startswith(_UTF16_PREFIXES):
        raise ValueError("is UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ValueError(f"is {describe_decode_error(content, fault)}") from fault


def decode_record(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError with the reason."""
    try:
        text = line.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError(f"not valid UTF-8 (byte {fault.start + 1} of the line); re-save the file as UTF-8") from fault
    try:
        value = decode_json(text)
    except ValueError as fault:
        raise ValueError(f"not valid JSON: {fault}; fix the line or remove it") from fault
    return check_record(value, bool(_SURROGATE_ESCAPE.search(text)))


class DuplicateKeyDict(dict[str, Any]):
    """A JSON object with a duplicate key: there is no way to know which value is meant."""

    duplicate_key: str


_parsed = threading.local()
"""`has_duplicates`: whether the JSON that this thread parsed last has an object with a duplicate key."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    _parsed.has_duplicates = True
    found, names = DuplicateKeyDict(plain), [name for name, _ in pairs]
    found.duplicate_key = next(name for name in names if names.count(name) > 1)
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_build_object)


def decode_json(text: str) -> Any:
    """Return the value of a JSON text; its objects with a duplicate key are `DuplicateKeyDict`s. Raises ValueError."""
    _parsed.has_duplicates = False
    try:
        value = _decoder.decode(text)
        is_deep = is_deep_json(value, text)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"it has more than {MAX_JSON_DEPTH} levels")
    return value


def check_record(value: Any, check_surrogates: bool) -> dict[str, Any]:
    """Return the value if it is a JSON object that tokenizers can read. Raises ValueError with the reason.

    `check_surrogates`: its text may contain an unpaired surrogate, which no tokenizer accepts.
    """
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
        raise ValueError(f'{kinds.get(type(value), "a number")}, not an object; write {{"key": value, …}}')
    if duplicate := _find_duplicate_key(value):
        raise ValueError(f"the key '{duplicate}' is written twice in it; keep one of them")
    if check_surrogates:
        try:
            # json.loads accepts an unpaired escape; encoding to UTF-8 is what finds it.
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise ValueError("unpaired surrogate (\\ud8…); write the whole character") from fault
    return value


def _find_duplicate_key(value: Any) -> str:
    """Return a duplicate key of the value, at any depth; empty if there is none."""
    if not _parsed.has_duplicates:
        return ""
    if isinstance(value, DuplicateKeyDict):
        return value.duplicate_key
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next(filter(None, map(_find_duplicate_key, inside)), "")


_GZIP_SIGNATURE, _PARQUET_SIGNATURE = b"\x1f\x8b", b"PAR1"
_OTHER_SIGNATURES = (
    (b"PK\x03\x04", "is a zip archive; unpack it"),
    (b"\x28\xb5\x2f\xfd", "is packed with zstd; unpack it with `zstd -d`"),
    (b"BZh", "is packed with bzip2; unpack it with `bunzip2`"),
    (b"\xfd7zXZ", "is packed with xz; unpack it with `unxz`"),
    (b"version https://git-lfs", "is a Git LFS pointer; `git lfs pull` fetches the file"),
    (b"<!doctype", "is HTML, such as an error page; download it again"),
    (b"<html", "is HTML, such as an error page; download it again"),
    (b"<?xml", "is XML, such as an error page; download it again"),
)
"""First bytes of files that no reader takes -> what they are, and the fix."""


def check_file_kind(path: Path) -> None:
    """Raise DataError for a file whose first bytes are those of another format than its name says."""
    with path.open("rb") as file:
        head = file.read(64)
    name, ending = display_path(path), file_extension(path.name)
    if ending.endswith(".gz") != head.startswith(_GZIP_SIGNATURE):
        if ending.endswith(".gz"):
            fix = f"mv {shlex.quote(name)} {shlex.quote(name[:-3])}"
            raise DataError(
                f"{name} is not packed: it is no gzip file, although its name ends in .gz; rename it: {fix}"
            )
        raise DataError(f"{name} is packed with gzip; rename it: mv {shlex.quote(name)} {shlex.quote(name + '.gz')}")
    is_parquet = head.startswith(_PARQUET_SIGNATURE)
    if is_parquet and ending != ".parquet":
        raise DataError(f"{name} is a parquet file; name it .parquet")
    if ending == ".parquet" and not is_parquet and head.lstrip()[:1] in (b"{", b"["):
        raise DataError(f"{name} is JSON text, not a parquet file; name it .jsonl, or .json if it is one list")
    for signature, problem in _OTHER_SIGNATURES:
        if head.removeprefix(BOM).lstrip()[: len(signature)].lower() == signature.lower():
            raise DataError(f"{name} {problem}")


def _decode_first(text: str) -> tuple[Any, int]:
    """Return the first value of a text, and where it ends. Raises ValueError."""
    _parsed.has_duplicates = False
    return _decoder.raw_decode(text, len(text) - len(text.lstrip()))


_LINES_COMMAND = (
    "python -c \"import json, re, sys; t = open(sys.argv[1], encoding='utf-8-sig').read(); "
    "[print(json.dumps(r, ensure_ascii=False)) for r in json.loads('[' + re.sub(r'(?m)^}\\s*^{', '},{', t) + ']')]\""
)
"""Shell command that writes objects of several lines as one line each."""


MAX_OPEN_SOURCES = 512
"""Sources of a process that keep their file open; a pattern may fit more files than a process may have open."""
_open_sources = weakref.WeakSet["JsonLinesSource"]()


class JsonLinesSource(BaseSource):
    """A JSON Lines file, read by offset: only the index is in memory. Thread-safe."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(display_path(path), path.parent, columns)
        # Arrays of int64 take 24 bytes per record; lists of Python integers would take about 100.
        self._offsets, self._sizes, self._line_numbers = array("q"), array("q"), array("q")
        self._file = open_maybe_gzip(path)
        self._reject_utf16()
        self._set_digest(*self._build_index())
        if self.bad_rows and (not len(self) or self._records_before_bad[0] == 0):
            self._reject_long_values(path)
        self._path, self._state, self._is_open = path, _read_state(self._file), True
        if len(_open_sources) < MAX_OPEN_SOURCES:
            _open_sources.add(self)
        elif path.suffix.lower() != ".gz":  # an unpacked file has no name to open it again
            self._file.close()
            self._is_open = False

    def _reject_utf16(self) -> None:
        """Raise DataError for UTF-16, in which no line decodes."""
        head = self._file.read(2)
        self._file.seek(0)
        if head.startswith(_UTF16_PREFIXES):
            raise DataError(f"{self.name} is UTF-16; save it as UTF-8")

    def _reject_long_values(self, path: Path) -> None:
        """Raise DataError if the lines are one array of objects, or if the first object takes several lines."""
        self._file.seek(0)
        # Only a file whose first line is bad is searched, and only if it starts with a bracket.
        start = self._file.read(64).removeprefix(BOM).lstrip()[:1]
        if start not in (b"[", b"{"):
            return
        self._file.seek(0)
        content = self._file.read() if start == b"[" else self._file.read(MAX_LINE_BYTES)
        with contextlib.suppress(ValueError, RecursionError):
            text = decode_text(content) if start == b"[" else content.decode("utf-8-sig", "ignore")
            value, end = _decode_first(text)
            rest = text[end:].strip()
            if isinstance(value, list) and value and all(isinstance(row, dict) for row in value) and not rest:
                raise DataError(f"{self.name} is one JSON array, not one object per line; name it .json")
            if isinstance(value, dict) and "\n" in text[:end].strip():
                if not rest and isinstance(value.get("data"), list):
                    raise DataError(f"{self.name} is one JSON object with a list under 'data'; name it .json")
                source, target = shlex.quote(self.name), shlex.quote(display_path(path.with_name(f"lines-{path.name}")))
                raise DataError(
                    f"{self.name} has JSON over several lines, and a record of .jsonl is one line; "
                    f"write it again: {_LINES_COMMAND} {source} > {target}"
                )

    def _build_index(self) -> tuple[str, set[str]]:
        content, names, offset = hashlib.sha256(), set[str](), 0
        for number, (line, size) in enumerate(_iter_lines(self._file, content.update), 1):
            if size > MAX_LINE_BYTES:
                self._add_bad_row(f"{self.name}:{number}", f"has {format_bytes(size)}, and a line {_LINE_LIMIT_HINT}")
            elif line.removeprefix(BOM).strip():  # it is not blank
                try:
                    # Every line is decoded once here, so that bad lines are known before training starts.
                    names.update(decode_record(line))
                    self._offsets.append(offset)
                    self._sizes.append(len(line))
                    self._line_numbers.append(number)
                except ValueError as fault:
                    self._add_bad_row(f"{self.name}:{number}", str(fault))
            # By the size read, not len(line): of a long line only the start is in memory.
            offset += size
        return content.hexdigest(), names

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return self._rename_columns(decode_record(self._read(self._offsets[index], self._sizes[index])))
        except (ValueError, OSError) as fault:
            problem = f"{self.location(index)}: the file was changed while it was in use ({fault}); start again"
            raise DataError(problem) from fault

    def _read(self, offset: int, size: int) -> bytes:
        # pread does not move the position of the shared file, so threads need no lock.
        if self._is_open:
            return os.pread(self._file.fileno(), size, offset)
        with self._path.open("rb") as file:
            if _read_state(file) != self._state:
                raise ValueError("it was written again")
            return os.pread(file.fileno(), size, offset)

    def location(self, index: int) -> str:
        return f"{self.name}:{self._line_numbers[index]}"


def _read_state(file: BinaryIO) -> tuple[int, int, int]:
    """Return inode, size and time of an open file, equal if it was neither written nor replaced."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


class RowsSource(BaseSource):
    """Base class of files whose rows are all in memory, each with its line or index in the file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(display_path(path), path.parent, columns)
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rename_columns(self._rows[index][1])

    def location(self, index: int) -> str:
        return self._place(self._rows[index][0])

    def _place(self, number: int) -> str:
        """Return where a row is, for messages: `train.csv:12`."""
        return f"{self.name}:{number}"

    def _add_row(self, number: int, read: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Add the record `read(*args)`, or, where it raises ValueError, a bad row."""
        try:
            self._rows.append((number, read(*args)))
        except ValueError as fault:
            self._add_bad_row(self._place(number), one_line(str(fault)))

    def _decode(self, content: bytes) -> str:
        """Return the text of the file. Raises DataError."""
        try:
            return decode_text(content)
        except ValueError as fault:
            raise DataError(f"{self.name} {fault}") from fault


class JsonListSource(RowsSource):
    """A JSON list of objects, or an object with such a list under `data`; all in memory."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path, columns)
        with open_maybe_gzip(path) as file:
            _check_memory(self.name, os.fstat(file.fileno()).st_size)
            content = file.read()
        rows, check_surrogates = self._parse(content)
        for index, row in enumerate(rows):
            self._add_row(index, check_record, row, check_surrogates)
        names = {name for _, row in self._rows for name in row}
        self._set_digest(hashlib.sha256(content).hexdigest(), names)

    def _parse(self, content: bytes) -> tuple[list[Any], bool]:
        text = self._decode(content)
        try:
            value = decode_json(text)
        except ValueError as fault:
            fix = "name it .jsonl if it has one object per line" if "Extra data" in str(fault) else "fix the file"
            raise DataError(f"{self.name} is not valid JSON: {fault}; {fix}") from fault
        rows = value.get("data") if isinstance(value, dict) else value
        if not isinstance(rows, list):
            raise DataError(f'{self.name} has no list of records; write [{{…}}, …] or {{"data": [{{…}}, …]}}')
        if not rows:
            raise DataError(f"{self.name} has no records; its list is empty")
        return rows, bool(_SURROGATE_ESCAPE.search(text))

    def _place(self, number: int) -> str:
        """Return `train.json[12]`, with the index in the list, from 0."""
        return f"{self.name}[{number}]"


SOURCE_TYPES: dict[str, Callable[[Path, Columns], Source]] = {
    ".jsonl": JsonLinesSource,
    ".jsonl.gz": JsonLinesSource,
    ".json": JsonListSource,
    ".json.gz": JsonListSource,
    ".parquet": ParquetSource,
}
"""File extension -> source class."""


def file_extension(name: str) -> str:
    """Return the extension in lower case: `.jsonl.gz` of `a.b.jsonl.gz`, `.csv` of `a.csv`."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])


def _iter_lines(file: BinaryIO, update_hash: Callable[[bytes], Any]) -> Iterator[tuple[bytes, int]]:
    """Yield (line, its size in bytes); of a line longer than MAX_LINE_BYTES only the start."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        update_hash(line)
        size, end = len(line), line
        while len(end) > MAX_LINE_BYTES and not end.endswith(b"\n"):  # skip the rest of a long line
            if not (end := file.readline(MAX_LINE_BYTES + 1)):
                break
            update_hash(end)
            size += len(end)
        yield line, size


def _check_memory(name: str, size: int) -> None:
    """Raise DataError for a list that would not fit into memory."""
    free = int(psutil.virtual_memory().available)
    # A process that runs out of memory is killed without a message, so check before reading.
    if size * JSON_MEMORY_FACTOR > free:
        problem = f"{name} has {format_bytes(size)} and is read into memory, of which {format_bytes(free)} are free"
        raise DataError(f"{problem}; write one record per line (.jsonl), which is read line by line")


MAX_DISK_SHARE = 0.5
"""Share of the free space in TMPDIR that one gzip file may unpack to: 1 MB may become 1000."""


def open_maybe_gzip(path: Path) -> BinaryIO:
    """Open a file for random access; a gzip file is first unpacked into an unnamed file in TMPDIR."""
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    temp_dir = tempfile.gettempdir()
    try:
        # A file without a name disappears with the process, however it ends.
        plain = tempfile.TemporaryFile()  # noqa: SIM115  it stays open as long as the source
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, _SizeLimitedWriter(plain, path, temp_dir), 1 << 20)
        plain.flush()
        plain.seek(0)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise DataError(
            f"{display_path(path)}: gzip file is incomplete or damaged ({fault}); download it again"
        ) from fault
    except OSError as fault:
        fix = "set TMPDIR to a folder with more space, or unpack it yourself"
        raise DataError(f"{display_path(path)} cannot be unpacked into {temp_dir}: {fault}; {fix}") from fault
    return plain


def read_whole_file(path: Path) -> bytes:
    """Return the content of a file, unpacked if it is a gzip file by name. Raises DataError where memory lacks."""
    with open_maybe_gzip(path) as file:
        _check_memory(display_path(path), os.fstat(file.fileno()).st_size)
        return file.read()


class _SizeLimitedWriter:
    """A file that takes only a share of the free disk space. Raises DataError if more is written."""

    def __init__(self, file: BinaryIO, path: Path, temp_dir: str) -> None:
        self._file, self._path, self._temp_dir = file, path, temp_dir
        self._remaining_bytes = self._max_bytes = int(shutil.disk_usage(temp_dir).free * MAX_DISK_SHARE)

    def write(self, chunk: bytes) -> int:
        self._remaining_bytes -= len(chunk)
        if self._remaining_bytes >= 0:
            return self._file.write(chunk)
        size, most = format_bytes(self._path.stat().st_size), format_bytes(self._max_bytes)
        problem = f"{display_path(self._path)} has {size} and unpacks to more than {most}, half of the free space in"
        raise DataError(f"{problem} {self._temp_dir}; set TMPDIR to a folder with more space, or unpack it yourself")
