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
from dstrain.data.free_memory import get_available_memory
from dstrain.data.limited_process import ResourceLimits, run_limited
from dstrain.data.paths import display_path
from dstrain.data.sources.base import BaseSource
from dstrain.errors import DataError
from dstrain.units import format_bytes

BATCH_ROWS, BATCH_BYTES = 1000, 16 << 20
"""Rows that are decoded together: up to so many, of about so many bytes."""
MAX_CACHED_BATCHES = 4
"""Batches that stay in memory: threads that read side by side are not far from one another."""

MAX_CACHED_BYTES = 256 << 20
"""Of them together, but that the newest stays."""
MAX_DECODE_BYTES, MAX_DECODE_FACTOR = 4 << 30, 64
"""Bytes that decoding may take beside what the process has, and how many times the file's size: the larger one counts, but no
more than half of what is free. The second is for rows of gigabytes."""
MAX_UNPACKED_BYTES, MAX_UNPACKED_FACTOR = 4 << 30, 10_000
"""Bytes that a file may unpack to, and how many times its size: the larger one counts."""


def decode_memory_limit(file_size: int) -> int:
    """Bytes that decoding a file of `size` bytes may take beside what the process has."""
    return max(MAX_DECODE_BYTES, min(file_size * MAX_DECODE_FACTOR, get_available_memory() // 2))


class ParquetSource(BaseSource):
    """The rows of a parquet file, by index. Thread-safe, and may be read by a forked process.

    Reading in order decodes every row once; an index before the newest batches begins its row group anew.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        """Decodes the whole file once, batch by batch: what cannot be read would only be found where its row is."""
        super().__init__(display_path(path), path.parent, columns)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as fault:
            raise DataError(f'{self.name} needs pyarrow; run pip install "dstrain[parquet]"') from fault
        self._read_errors = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
        self._lock = threading.Lock()
        self._cached_batches: deque[tuple[int, Any]] = deque(maxlen=MAX_CACHED_BATCHES)
        self._batch_iterator: Iterator[tuple[int, Any]] = iter(())
        self._next_position = (-1, 0)
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            names = self._check_in_subprocess(path)
        except self._read_errors as fault:
            raise DataError(f"{self.name} is not a readable parquet file ({fault}); regenerate it") from fault
        finally:
            pyarrow.default_memory_pool().release_unused()
        if not self._row_group_ends or not self._row_group_ends[-1]:
            raise DataError(f"{self.name} has no records; its table is empty")
        self._set_digest(file_digest(path), names)

    def _check_in_subprocess(self, path: Path) -> set[str]:
        """`_check`, where the file cannot take all memory: 400 bytes can unpack to gigabytes. Raises DataError."""
        size = path.stat().st_size
        memory = decode_memory_limit(size)
        tried = run_limited(
            lambda: self._check_batches(max(MAX_UNPACKED_BYTES, size * MAX_UNPACKED_FACTOR)), ResourceLimits(memory)
        )
        if tried.status == "done":
            self._load_row_group_ends()
            return set(tried.value)
        if tried.status == "raised":
            raise DataError(f"{self.name} is not a readable parquet file ({tried.value[1]}); regenerate it")
        if tried.status == "memory":
            problem = f"{self.name} has {format_bytes(size)}, and a few of its rows take more than {format_bytes(memory)} of memory"
        else:
            problem = f"the process that looked through {self.name} was ended from outside"
        raise DataError(f"{problem}; write it again with smaller values")

    def _load_row_group_ends(self) -> None:
        about = self._file.metadata
        self._row_group_ends = [
            *itertools.accumulate(about.row_group(group).num_rows for group in range(about.num_row_groups))
        ]

    def _check_batches(self, max_bytes: int) -> list[str]:
        """The names of the columns. Raises what pyarrow raises of a damaged file.

        ValueError where it unpacks to more than `most` bytes.
        """
        self._load_row_group_ends()
        names = list(self._file.schema_arrow.names)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"it has two columns '{twice[0]}'")
        for group in range(len(self._row_group_ends)):
            for start, batch in self._iter_batches(group):
                max_bytes -= batch.nbytes
                if max_bytes < 0:
                    raise ValueError(f"it unpacks to more than {MAX_UNPACKED_FACTOR} times its size")
                batch.validate(full=True)  # text that is no UTF-8
                if start == 0:
                    batch.slice(0, 1).to_pylist()
        return names

    def _iter_batches(self, row_group: int) -> Iterator[tuple[int, Any]]:
        """(the first row's index in the file, rows) of a row group. One thread: pyarrow's own do not outlive a fork."""
        about = self._file.metadata.row_group(row_group)
        rows = min(BATCH_ROWS, max(1, BATCH_BYTES * about.num_rows // max(about.total_byte_size, 1)))
        start = self._row_group_ends[row_group] - about.num_rows
        for batch in self._file.iter_batches(batch_size=rows, row_groups=[row_group], use_threads=False):
            yield start, batch
            start += batch.num_rows

    def __len__(self) -> int:
        return int(self._row_group_ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            start, batch = self._get_batch(index)
            return self._rename_columns(batch.slice(index - start, 1).to_pylist()[0])
        except self._read_errors as fault:  # a date that Python has no word for
            raise DataError(
                f"{self.location(index)}: a value cannot be read ({fault}); leave its column out"
            ) from fault

    def _get_batch(self, index: int) -> tuple[int, Any]:
        with self._lock:
            for start, batch in self._cached_batches:
                if start <= index < start + batch.num_rows:
                    return start, batch
            group = bisect.bisect_right(self._row_group_ends, index)
            if self._next_position[0] != group or self._next_position[1] > index:
                self._batch_iterator = self._iter_batches(group)
            for start, batch in self._batch_iterator:
                self._next_position = (group, start + batch.num_rows)
                self._cached_batches.append((start, batch))
                while (
                    len(self._cached_batches) > 1
                    and sum(kept.nbytes for _, kept in self._cached_batches) > MAX_CACHED_BYTES
                ):
                    self._cached_batches.popleft()
                if index < self._next_position[1]:
                    return start, batch
        raise ValueError("the file was changed while it was in use")

    def location(self, index: int) -> str:
        """`train.parquet[12]`: the row, from 0."""
        return f"{self.name}[{index}]"
