"""The rows of a parquet file, decoded a few at a time from where the file is mapped."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain.cache_dir import file_digest
from dstrain.data.free_memory import free_memory
from dstrain.data.limited_process import Limits, attempt
from dstrain.data.sources.base import Rows, show_path
from dstrain.errors import DataError
from dstrain.units import show_bytes

BATCH_ROWS, BATCH_BYTES = 1000, 16 << 20
"""Rows that are decoded together: up to so many, of about so many bytes."""
KEPT = 4
"""Batches that stay in memory: threads that read side by side are not far from one another."""

KEPT_BYTES = 256 << 20
"""Of them together, but that the newest stays."""
MOST_MEMORY, MEMORY_TIMES = 4 << 30, 64
"""Bytes that decoding may take beside what the process has, and how many times the file's size: the larger one counts, but no
more than half of what is free. The second is for rows of gigabytes."""
MOST_UNPACKED, MOST_TIMES = 4 << 30, 10_000
"""Bytes that a file may unpack to, and how many times its size: the larger one counts."""


def most_memory(size: int) -> int:
    """Bytes that decoding a file of `size` bytes may take beside what the process has."""
    return max(MOST_MEMORY, min(size * MEMORY_TIMES, free_memory() // 2))


class Parquet(Rows):
    """The rows of a parquet file, by index. Thread-safe, and may be read by a forked process.

    Reading in order decodes every row once; an index before the newest batches begins its row group anew.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        """Decodes the whole file once, batch by batch: what cannot be read would only be found where its row is."""
        super().__init__(show_path(path), path.parent, columns)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as fault:
            raise DataError(f'{self.name} needs pyarrow; run pip install "dstrain[parquet]"') from fault
        self._faults = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, Any]] = deque(maxlen=KEPT)
        self._ahead: Iterator[tuple[int, Any]] = iter(())
        self._next = (-1, 0)
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            names = self._check_limited(path)
        except self._faults as fault:
            raise DataError(f"{self.name} is not a readable parquet file ({fault}); regenerate it") from fault
        finally:
            pyarrow.default_memory_pool().release_unused()
        if not self._ends or not self._ends[-1]:
            raise DataError(f"{self.name} has no records; its table is empty")
        self._settle(file_digest(path), names)

    def _check_limited(self, path: Path) -> set[str]:
        """`_check`, where the file cannot take all memory: 400 bytes can unpack to gigabytes. Raises DataError."""
        size = path.stat().st_size
        memory = most_memory(size)
        tried = attempt(lambda: self._check(max(MOST_UNPACKED, size * MOST_TIMES)), Limits(memory))
        if tried.how == "done":
            self._find_ends()
            return set(tried.value)
        if tried.how == "raised":
            raise DataError(f"{self.name} is not a readable parquet file ({tried.value[1]}); regenerate it")
        if tried.how == "memory":
            problem = f"{self.name} has {show_bytes(size)}, and a few of its rows take more than {show_bytes(memory)} of memory"
        else:
            problem = f"the process that looked through {self.name} was ended from outside"
        raise DataError(f"{problem}; write it again with smaller values")

    def _find_ends(self) -> None:
        about = self._file.metadata
        self._ends = [*itertools.accumulate(about.row_group(group).num_rows for group in range(about.num_row_groups))]

    def _check(self, most: int) -> list[str]:
        """The names of the columns. Raises what pyarrow raises of a damaged file.

        ValueError where it unpacks to more than `most` bytes.
        """
        self._find_ends()
        names = list(self._file.schema_arrow.names)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"it has two columns '{twice[0]}'")
        for group in range(len(self._ends)):
            for start, batch in self._decode(group):
                most -= batch.nbytes
                if most < 0:
                    raise ValueError(f"it unpacks to more than {MOST_TIMES} times its size")
                batch.validate(full=True)  # text that is no UTF-8
                if start == 0:
                    batch.slice(0, 1).to_pylist()
        return names

    def _decode(self, group: int) -> Iterator[tuple[int, Any]]:
        """(the first row's index in the file, rows) of a row group. One thread: pyarrow's own do not outlive a fork."""
        about = self._file.metadata.row_group(group)
        rows = min(BATCH_ROWS, max(1, BATCH_BYTES * about.num_rows // max(about.total_byte_size, 1)))
        start = self._ends[group] - about.num_rows
        for batch in self._file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False):
            yield start, batch
            start += batch.num_rows

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            start, batch = self._batch(index)
            return self._rename(batch.slice(index - start, 1).to_pylist()[0])
        except self._faults as fault:  # a date that Python has no word for
            raise DataError(f"{self.where(index)}: a value cannot be read ({fault}); leave its column out") from fault

    def _batch(self, index: int) -> tuple[int, Any]:
        with self._lock:
            for start, batch in self._batches:
                if start <= index < start + batch.num_rows:
                    return start, batch
            group = bisect.bisect_right(self._ends, index)
            if self._next[0] != group or self._next[1] > index:
                self._ahead = self._decode(group)
            for start, batch in self._ahead:
                self._next = (group, start + batch.num_rows)
                self._batches.append((start, batch))
                while len(self._batches) > 1 and sum(kept.nbytes for _, kept in self._batches) > KEPT_BYTES:
                    self._batches.popleft()
                if index < self._next[1]:
                    return start, batch
        raise ValueError("the file was changed while it was in use")

    def where(self, index: int) -> str:
        """`train.parquet[12]`: the row, from 0."""
        return f"{self.name}[{index}]"
