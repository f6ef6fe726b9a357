"""metrics.jsonl and events.jsonl: one JSON object per line, whole lines only."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dstrain.errors import RunError

Row = Mapping[str, Any]
"""One log or evaluation: name -> number, word or None."""

HEAD = ("time", "step", "samples", "epoch", "split", "loss")
TAIL = (
    "lr",
    "grad_norm",
    "skipped",
    "tokens_per_second",
    "samples_per_second",
    "step_seconds",
    "data_wait_seconds",
    "save_stall_seconds",
    "save_seconds",
    "peak_memory_gib",
    "host_memory_gib",
    "gpu_utilization",
)


def now() -> str:
    """The time as ISO 8601 in UTC with milliseconds: `2025-01-31T12:00:00.000Z`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def task_metrics(row: Row) -> list[str]:
    """The names in a row that a task chose, as they came."""
    return [name for name in row if name not in HEAD and name not in TAIL]


def in_order(row: Row) -> dict[str, Any]:
    """The same row in the order of the file: when and where, loss, the task's metrics, rates."""
    return {name: row[name] for name in (*HEAD, *task_metrics(row), *TAIL) if name in row}


def strict(value: Any) -> Any:
    """The same value with null for what JSON cannot say: inf and nan."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, after a rename, where the file system can (some network ones cannot)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class Journal:
    """The two files of a run folder. Only rank 0 writes; on the others every call does nothing."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._writes = rank == 0
        if self._writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = _Lines(folder / "metrics.jsonl")
            self._events = _Lines(folder / "events.jsonl")

    def write(self, row: Row) -> None:
        """Append a row to metrics.jsonl."""
        if self._writes:
            self._metrics.append(in_order({"time": now(), **row}))

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl, and have it on the disk before this returns."""
        if self._writes:
            self._events.append({"time": now(), "event": event, **fields})
            self._events.sync()

    def cut_back(self, step: int) -> int:
        """Drop the rows after `step`, which a resumed run writes again; returns how many.

        Lines that cannot be read are dropped too, and named in an event.
        """
        if not self._writes:
            return 0
        dropped, damaged = self._metrics.keep(lambda row: row.get("step", 0) <= step)
        if damaged:
            what = "not valid JSON, such as a changed byte makes; removed"
            self.event("rows_damaged", file="metrics.jsonl", lines=damaged[:100], count=len(damaged), what=what)
        return dropped

    def close(self) -> None:
        if self._writes:
            self._metrics.close()
            self._events.close()


class _Lines:
    """A file of JSON lines that is appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cut_torn()
        self._open()

    def append(self, row: Row) -> None:
        text = json.dumps(strict(row), ensure_ascii=False, allow_nan=False)
        line = text.encode(errors="backslashreplace") + b"\n"  # a file name need not be UTF-8
        with _writing(self._path):
            # Unbuffered, so that another process sees the row at once; a short write leaves a rest.
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        with _writing(self._path):
            os.fsync(self._file.fileno())

    def keep(self, wanted: Callable[[Row], bool]) -> tuple[int, list[int]]:
        """Rewrite the file with the wanted rows, whole or not at all; (how many were dropped, the damaged lines)."""
        with _writing(self._path, "read"):
            lines = self._path.read_bytes().splitlines(keepends=True)
        rows = [_parse(line) for line in lines]
        kept = [line for line, row in zip(lines, rows, strict=True) if row is not None and wanted(row)]
        if len(kept) < len(lines):
            self._replace(kept)
        return len(lines) - len(kept), [number for number, row in enumerate(rows, 1) if row is None]

    def _replace(self, lines: list[bytes]) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            with _writing(temporary), temporary.open("wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        except RunError:
            temporary.unlink(missing_ok=True)
            raise
        with _writing(self._path):
            self._file.close()
            os.replace(temporary, self._path)
            sync_folder(self._path.parent)
        self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        with _writing(self._path):
            self._file = self._path.open("ab", buffering=0)

    def _cut_torn(self) -> None:
        """Cut off a last line that a kill -9 or a power cut left unfinished."""
        if not self._path.exists():
            return
        with _writing(self._path, "read"):
            content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        if last and _parse(last) is None:
            whole = whole[: -len(last)]
        if len(whole) < len(content):
            with _writing(self._path):
                os.truncate(self._path, len(whole))


@contextlib.contextmanager
def _writing(path: Path, doing: str = "write") -> Iterator[None]:
    """Raises RunError, in a sentence, for what the system says."""
    try:
        yield
    except OSError as error:
        mend = "make room and start again"
        if error.errno in (errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS):
            mend = "it must be a file that can be written: correct that, or give another --run-dir"
        elif error.errno == errno.EIO:
            mend = "the disk or the network file system has a fault: start again where it is well"
        raise RunError(f"cannot {doing} {path}: {error.strerror}; {mend}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without the damaged ones; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [row for row in map(_parse, lines) if row is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row in a line; None where it is damaged: not a JSON object, or with a step that is not a number."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _is_step(row.get("step", 0)) else None


def _is_step(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))
