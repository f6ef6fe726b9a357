"""Record source for parquet files, decoded in small batches from a memory-mapped file."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.cache import file_digest
from dstrain.data.sources.base import BaseSource, Columns, drop_added_nulls
from dstrain.errors import DataError
from dstrain.files import display_path

BATCH_ROWS, BATCH_BYTES = 1000, 16 << 20
"""Maximum number and approximate size of rows that are decoded together."""
MAX_CACHED_BATCHES = 4
"""Decoded batches in memory; threads that read at the same time need rows close to each other."""


class ParquetSource(BaseSource):
    """The rows of a parquet file, by index. Thread-safe; forked processes may read it too.

    Reading in order decodes every row once; an index before the cached batches decodes its row
    group again from the start.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        """Decode the whole file once, to report unreadable rows at the start. Raises DataError."""
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
            # Mapped, so that processes of a host share the file's pages.
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            names = self._check_batches()
        except self._read_errors as fault:
            raise DataError(f"{self.name} is not a readable parquet file ({fault}); regenerate it") from fault
        finally:
            # The pool would otherwise keep the memory of the decoded batches for later.
            pyarrow.default_memory_pool().release_unused()
        if not self._row_group_ends or not self._row_group_ends[-1]:
            raise DataError(f"{self.name} has no records; its table is empty")
        self._set_digest(file_digest(path), names)

    def _check_batches(self) -> set[str]:
        """Find where the row groups end, and decode all batches. Returns the column names.

        Raises pyarrow's errors for a damaged file, and ValueError for duplicate columns.
        """
        metadata = self._file.metadata
        groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
        self._row_group_ends = [*itertools.accumulate(group.num_rows for group in groups)]
        names = list(self._file.schema_arrow.names)
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"it has two columns '{duplicates[0]}'")
        for group in range(len(self._row_group_ends)):
            for start, batch in self._iter_batches(group):
                batch.validate(full=True)  # finds text that is not valid UTF-8
                # One row as Python objects: some types fail only there.
                if start == 0:
                    batch.slice(0, 1).to_pylist()
        return set(names)

    def _iter_batches(self, row_group: int) -> Iterator[tuple[int, Any]]:
        """Yield (index of the first row in the file, rows) for a row group."""
        group = self._file.metadata.row_group(row_group)
        rows = min(BATCH_ROWS, max(1, BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))
        start = self._row_group_ends[row_group] - group.num_rows
        # use_threads=False: pyarrow's threads do not survive a fork, and the child would wait for them.
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
            return self._rename_columns(drop_added_nulls(batch.slice(index - start, 1).to_pylist()[0]))
        except self._read_errors as fault:  # such as a date outside of the range of Python's datetime
            raise DataError(
                f"{self.location(index)}: a value cannot be read ({fault}); leave its column out"
            ) from fault

    def _get_batch(self, index: int) -> tuple[int, Any]:
        with self._lock:
            for start, batch in self._cached_batches:
                if start <= index < start + batch.num_rows:
                    return start, batch
            # parquet has no access by row: continue in the row group, or start it again.
            group = bisect.bisect_right(self._row_group_ends, index)
            # Another row group, or a row before the next one.
            if self._next_position[0] != group or self._next_position[1] > index:
                self._batch_iterator = self._iter_batches(group)
            for start, batch in self._batch_iterator:
                self._next_position = (group, start + batch.num_rows)
                self._cached_batches.append((start, batch))
                if index < self._next_position[1]:
                    return start, batch
        raise ValueError("the file was changed while it was in use")
