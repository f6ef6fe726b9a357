"""The run log: metrics.jsonl and events.jsonl, one JSON object per line."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar

from dstrain.errors import RunError, fix_for_os_error
from dstrain.files import RETRY_SECONDS, TRANSIENT_ERRNOS, atomic_write, open_for_writing, open_regular_file, parse_json
from dstrain.process_setup import log_stdout
from dstrain.report.observe import observing

T = TypeVar("T")
Row = Mapping[str, Any]
"""Metrics of a log or evaluation: name -> number, text or None."""

LEADING_COLUMNS = ("time", "step", "samples", "epoch", "split", "loss")
READ_BYTES = 1 << 20
"""Bytes of a file that are read at a time."""
MAX_LINE_BYTES = 1 << 25
"""A longer line is no row."""
BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors write."""
TRAILING_COLUMNS = (
    "lr",
    "grad_norm",
    "skipped",
    "tokens_per_second",
    "padding",
    "samples_per_second",
    "step_seconds",
    "data_wait_seconds",
    "save_stall_seconds",
    "save_seconds",
    "peak_memory_gib",
    "allocated_memory_gib",
    "reserved_memory_gib",
    "pinned_memory_gib",
    "host_memory_gib",
    "resident_memory_gib",
    "available_memory_gib",
    "gpu_utilization",
)


def format_current_time() -> str:
    """Return the time as ISO 8601 in UTC with milliseconds: `2025-01-31T12:00:00.000Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def task_metric_names(row: Row) -> list[str]:
    """Return the names of the task's own metrics in a row, in their order."""
    return [name for name in row if name not in LEADING_COLUMNS and name not in TRAILING_COLUMNS]


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None for inf and nan, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(item) for key, item in value.items()}
    return [replace_nonfinite(item) for item in value] if isinstance(value, (list, tuple)) else value


PAUSE_SECONDS = 5.0
"""A lease whose holder is silent for three times this may be taken over (launch/lease.py)."""


def _read_clock() -> float:
    """Return seconds of a clock that also counts while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class RunLog:
    """Writer of the two files. Only rank 0 writes; on other ranks every method does nothing."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        check_owner: Callable[[], None] | None = None,
        repairs: bool = True,
    ) -> None:
        """`check_owner`: raises if another launch has taken the folder; called before a row that follows a pause.

        `repairs`: repair what an earlier launch left (`repair_file`); false where another process has the files open.
        """
        self.folder = folder
        self._check_owner, self._checked_at = check_owner, _read_clock()
        self._is_writer = rank == 0
        self._events_so_far = list[dict[str, Any]]()
        self._listeners = list[Callable[[Row], object]]()
        if self._is_writer:
            self._metrics = _JsonLinesFile(folder / "metrics.jsonl", repairs)
            self._events = _JsonLinesFile(folder / "events.jsonl", repairs)
            for file in (self._metrics, self._events):
                if file.set_aside is not None:
                    self.announce(
                        "warning: {file} held lines that are not rows of this run, such as those of another program; it is "
                        "kept as {kept_as}, and its {rows} rows were copied into a new {file}".format(**file.set_aside),
                        "file_set_aside",
                        **file.set_aside,
                    )

    def log_metrics(self, row: Row) -> None:
        """Append a row to metrics.jsonl. Raises RunError if it cannot be written."""
        if self._is_writer:
            self._check_after_pause()
            row = {"time": format_current_time(), **row}
            ordered = (*LEADING_COLUMNS, *task_metric_names(row), *TRAILING_COLUMNS)
            self._metrics.append({name: row[name] for name in ordered if name in row})

    def log_event(self, event: str, **fields: Any) -> None:
        """Append a row to events.jsonl and sync it to disk. Raises RunError if it cannot be written."""
        if self._is_writer:
            self._check_after_pause()
            row = {"time": format_current_time(), "event": event, **fields}
            self._events.append(row)
            self._events.sync()
            self._events_so_far.append(row)
            for listener in self._listeners:
                listener(row)

    def add_listener(self, listener: Callable[[Row], object]) -> None:
        """Call `listener` with each event from here on, after those of this start."""
        for row in self._events_so_far:
            listener(row)
        self._listeners.append(listener)

    def announce(self, line: str, event: str, **fields: Any) -> None:
        """Log an event, and print its line on the terminal."""
        self.log_event(event, **fields)
        if self._is_writer:
            with observing("a line of the log"):
                log_stdout(line)

    def warn(self, text: str, **fields: Any) -> None:
        """Announce a warning."""
        self.announce(f"warning: {text}", "warning", what=text, **fields)

    def _check_after_pause(self) -> None:
        """Raise where this process stood still for so long that another launch may have taken the folder, and has."""
        now = _read_clock()
        if self._check_owner is not None and now - self._checked_at > PAUSE_SECONDS:
            self._check_owner()
        self._checked_at = now

    def truncate_after(self, step: int) -> int:
        """Remove the lines after the last row up to `step`, which a resumed run writes again; return their number."""
        return self._metrics.truncate_after(lambda row: row.get("step", 0) <= step) if self._is_writer else 0

    def close(self) -> None:
        """Close both files."""
        if self._is_writer:
            self._metrics.close()
            self._events.close()


def _try_twice(action: Callable[[], T]) -> T:
    """Return `action()`; after an error that may pass, and a pause, try it again: a row must not end a week of training."""
    try:
        return action()
    except OSError as error:
        if error.errno not in TRANSIENT_ERRNOS:
            raise
    time.sleep(RETRY_SECONDS)
    return action()


class _JsonLinesFile:
    """File of JSON lines, opened for appending."""

    def __init__(self, path: Path, repairs: bool) -> None:
        self._path = path
        self.set_aside: dict[str, Any] | None = None
        """As `repair_file` returns it."""
        with _wrap_os_errors(path):
            self._file = open_for_writing(path, append=True)
            if repairs:
                self.set_aside = repair_file(path)
            if self.set_aside is not None:
                self._file.close()
                self._file = open_for_writing(path, append=True)

    def append(self, row: Row) -> None:
        text = json.dumps(replace_nonfinite(row), ensure_ascii=False, allow_nan=False)
        line = text.encode(errors="backslashreplace") + b"\n"  # file names in events need not be UTF-8
        with _wrap_os_errors(self._path):
            # The file is unbuffered, so that readers see the row at once, but then a write may be partial.
            while line:
                written = _try_twice(partial(self._file.write, line))
                line = line[written:]

    def sync(self) -> None:
        with _wrap_os_errors(self._path):
            _try_twice(partial(os.fsync, self._file.fileno()))

    def truncate_after(self, predicate: Callable[[Row], bool]) -> int:
        """Remove all lines after the last row that matches; return their number."""
        with _wrap_os_errors(self._path, "read"):
            last = find_last_row(self._path, predicate)
        if last.later_lines:
            with _wrap_os_errors(self._path):
                os.ftruncate(self._file.fileno(), last.end)
        return last.later_lines

    def close(self) -> None:
        self._file.close()


def repair_file(path: Path) -> dict[str, Any] | None:
    """Make a file end after a whole row, before rows are appended. Raises OSError.

    A kill -9 or a power cut leaves an incomplete last line, or zeros: they are cut off. A whole row gets its line break.
    A file with anything else is renamed and its rows are copied: nothing else of it is lost or changed. Returns the
    names of both files and the number of rows then.
    """
    end, last_line = 0, b""
    with open_regular_file(path) as file:
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            # Only the last line may lack its end.
            if last_line or (line.endswith(b"\n") and not _is_row(line)):
                return _set_aside(path)
            if line.endswith(b"\n"):
                end += len(line)
            else:
                last_line = line
    row = last_line.rstrip(b"\0")
    if row and not row.startswith(b"{"):
        return _set_aside(path)
    if not last_line:
        return None
    with open_for_writing(path, append=True) as repaired:
        if parse_row(row) is None:
            repaired.truncate(end)
        else:
            repaired.truncate(end + len(row))
            repaired.write(b"\n")
    return None


def _is_row(line: bytes) -> bool:
    """Return True for a line that may stay: a row without a byte order mark, or a blank line."""
    return line.isspace() or (not line.startswith(BOM) and parse_row(line) is not None)


def _set_aside(path: Path) -> dict[str, Any]:
    """Rename a file, and write a new one with its rows."""
    kept = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
    os.rename(path, kept)
    count = 0

    def write_rows(new_file: IO[bytes]) -> None:
        nonlocal count
        with open_regular_file(kept) as file:
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                row = line.removeprefix(BOM).strip()
                if parse_row(row) is not None:
                    new_file.write(row + b"\n")
                    count += 1

    atomic_write(path, write_rows)
    return {"file": path.name, "kept_as": kept.name, "rows": count}


@contextlib.contextmanager
def _wrap_os_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Context that raises RunError, with a fix, for an OSError."""
    try:
        yield
    except OSError as error:
        fix = fix_for_os_error(error, "write to another disk")
        if error.errno in (errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "it must be a writable file: correct that, or give another --run-dir"
        elif error.errno == errno.EIO:
            fix = "the disk or network file system failed: start again on one that works"
        raise RunError(f"cannot {action} {path}: {error.strerror}; {fix}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl or events.jsonl without damaged lines.

    Returns no rows if the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:  # a missing file has no rows; a summary at the end of a run must not fail it
        return []
    return [row for row in map(parse_row, lines) if row is not None]


class LastRow(NamedTuple):
    """Last row of a file that matches; None if there is none."""

    row: dict[str, Any] | None
    end: int
    """Offset of the byte after the row; 0 if there is none."""
    later_lines: int
    """Number of lines after it, damaged ones included."""


def find_last_row(path: Path, predicate: Callable[[Row], bool]) -> LastRow:
    """Find the last row that matches, reading from the end of the file. Raises OSError."""
    later = 0
    with path.open("rb") as file:
        for end, line in _iter_lines_from_end(file):
            row = parse_row(line) if line.endswith(b"\n") else None
            if row is not None and predicate(row):
                return LastRow(row, end, later)
            later += 1
    return LastRow(None, 0, later)


def _iter_lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset of the byte after the line, line), the last line first."""
    start, first_line = file.seek(0, os.SEEK_END), b""
    while start:
        length = min(start, max(READ_BYTES, len(first_line)))
        start = file.seek(start - length)
        block = file.read(length) + first_line
        end = start + len(block)
        first_line, *lines = re.findall(rb"[^\n]*\n|[^\n]+", block)
        for line in reversed(lines):
            yield end, line
            end -= len(line)
    if first_line:
        yield len(first_line), first_line


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line; None if it is not a JSON object, or its step is not a number."""
    try:
        row = parse_json(line.removeprefix(BOM))
    except ValueError:
        return None
    step = row.get("step", 0) if isinstance(row, dict) else None
    return row if type(step) is int or (isinstance(step, float) and math.isfinite(step)) else None
