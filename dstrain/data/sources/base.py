"""The source protocol, the base class of readers, and wrappers: head, concatenation, lazy opening."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from dstrain.data.records import BadRow, Record
from dstrain.errors import DataError, Fault, suggest_name
from dstrain.files import WatchedFile, display_path

Columns = Mapping[str, str | None]
"""Column of a file -> key of a record format, or None to leave the column out."""


class Source(Protocol):
    """Records by index. Only rows that decode are counted; the others are in `bad_rows`."""

    digest: str
    """Hash of the data and of the column renaming: equal digests mean equal records."""

    @property
    def bad_rows(self) -> list[BadRow]:
        """Rows that are not records."""

    def bad_rows_before(self, index: int) -> list[BadRow]:
        """Return the bad rows in front of a record."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a record. A source that does more than decode raises BadRecord where it cannot be used."""

    def location(self, index: int) -> str:
        """Return where a record is, for messages: `train.jsonl:12`."""

    def get_base_dir(self, index: int) -> Path:
        """Return the folder that relative paths in this record start from."""


@runtime_checkable
class DerivedSource(Protocol):
    """A source that makes its records from those of another one and from other files, such as documents."""

    def watched_files(self) -> Iterable[WatchedFile]:
        """Return the other files that the records read so far depend on."""

    def summarize(self) -> list[str]:
        """Return sentences on how the records read so far were made, for reports."""


@runtime_checkable
class NotedSource(Protocol):
    """A source with notes of its own for `dstrain data check`."""

    def get_notes(self, index: int) -> list[str]:
        """Return what is noted on a usable record that has been read."""

    def describe_check(self) -> list[str]:
        """Return sentences on the records, all of which have been read."""


class BaseSource:
    """Base class of sources that read one file or dataset, with a name, a folder and renamed columns."""

    def __init__(self, name: str, base_dir: Path, columns: Columns) -> None:
        self.name, self.base_dir, self.columns = name, base_dir, dict(columns)
        self.bad_rows: list[BadRow] = []
        self._records_before_bad: list[int] = []
        self.digest = ""
        self.unread = ""
        """A sentence on the files of a folder that are not read; empty if there are none."""
        self.missing_columns: dict[str, str] = {}
        """Column of data.columns that the file lacks, where it has the key itself -> a suggestion."""

    def __len__(self) -> int:
        raise NotImplementedError

    def get_base_dir(self, index: int) -> Path:
        return self.base_dir

    def location(self, index: int) -> str:
        """Return `train.parquet[12]`, with the row, from 0."""
        return f"{self.name}[{index}]"

    def bad_rows_before(self, index: int) -> list[BadRow]:
        return self.bad_rows[: bisect.bisect_right(self._records_before_bad, index)]

    def _add_bad_row(self, location: str, reason: str) -> None:
        """Add a bad row that follows the records so far."""
        self.bad_rows.append(BadRow(location, reason))
        self._records_before_bad.append(len(self))

    def _set_digest(self, content_digest: str, column_names: set[str]) -> None:
        """Set the digest. Raises DataError for renamed columns that no record has."""
        # Sorted, because the order of the renaming does not matter to the records.
        renaming = json.dumps(sorted(self.columns.items()))
        self.digest = (
            hashlib.sha256(f"{content_digest} {renaming}".encode()).hexdigest() if self.columns else content_digest
        )
        # No names at all: there is no good record, and the bad ones are reported instead.
        absent = [(old, new) for old, new in self.columns.items() if new and old not in column_names and column_names]
        hints = {
            old: suggest_name(old, sorted(column_names)).replace("known here:", "its columns are") for old, _ in absent
        }
        # A file that has the key itself needs no renaming: a recipe may have files of several forms.
        self.missing_columns = {old: hints[old] for old, new in absent if new in column_names}
        missing = [old for old, new in absent if new not in column_names]
        if missing:
            raise DataError(
                Fault(f"data.columns.{name}", f"no record of {self.name} has the column '{name}'", hints[name])
                for name in missing
            )

    def _rename_columns(self, record: Mapping[str, Any]) -> Record:
        """Return the record with the keys that its columns are renamed to; a column renamed to null is left out."""
        if not self.columns:
            return Record(record)
        found = Record({name: value for name, value in record.items() if self.columns.get(name, name) is not None})
        renamed = {old: new for old, new in self.columns.items() if new is not None and old in record}
        # A column that is renamed to the name of another one replaces it; that one then counts as not used.
        kept = {name: value for name, value in found.items() if name not in renamed}
        origins = {new: old for old, new in renamed.items()}
        return found.derive(kept | {new: record[old] for old, new in renamed.items()}, origins)


def drop_added_nulls(value: Any) -> Any:
    """Return a value of a table's row without the nulls that the table adds to arguments and parameters of functions.

    A table gives the arguments of each call the names of all calls, with null: a model would learn to write them.
    """
    if isinstance(value, Mapping):
        return {
            key: _drop_nulls(item) if "name" in value and key in ("arguments", "parameters") else drop_added_nulls(item)
            for key, item in value.items()
        }
    is_nested = isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value[:1])
    return [drop_added_nulls(item) for item in value] if is_nested else value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


class WrappedSource:
    """A source made of others: a subclass says which record an index means, and the others answer."""

    def __init__(self, sources: Sequence[Source], digest: str) -> None:
        self.sources, self.digest = tuple(sources), digest

    def find_source(self, index: int) -> tuple[Source, int]:
        """Return the source that holds the record, and the record's index there. Raises IndexError."""
        return self.sources[0], index

    @property
    def bad_rows(self) -> list[BadRow]:
        return [row for source in self.sources for row in source.bad_rows]

    def bad_rows_before(self, index: int) -> list[BadRow]:
        last, inside = self.find_source(index)
        earlier = itertools.takewhile(lambda source: source is not last, self.sources)
        return [row for source in earlier for row in source.bad_rows] + last.bad_rows_before(inside)

    def __bool__(self) -> bool:
        """Return whether it has records, without counting them."""
        return any(self.sources)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, inside = self.find_source(index)
        return source[inside]

    def location(self, index: int) -> str:
        source, inside = self.find_source(index)
        return source.location(inside)

    def get_base_dir(self, index: int) -> Path:
        source, inside = self.find_source(index)
        return source.get_base_dir(inside)

    def watched_files(self) -> Iterable[WatchedFile]:
        derived = [source for source in self.sources if isinstance(source, DerivedSource)]
        return [file for source in derived for file in source.watched_files()]

    def summarize(self) -> list[str]:
        derived = [source for source in self.sources if isinstance(source, DerivedSource)]
        return [sentence for source in derived for sentence in source.summarize()]


class HeadSource(WrappedSource):
    """The first `count` records of a source."""

    def __init__(self, source: Source, count: int) -> None:
        super().__init__([source], hashlib.sha256(f"{source.digest} {count}".encode()).hexdigest())
        self._count = count

    def __bool__(self) -> bool:
        return bool(self._count) and super().__bool__()

    @property
    def bad_rows(self) -> list[BadRow]:
        """Those in front of its last record."""
        return self.bad_rows_before(len(self) - 1) if len(self) < super().__len__() else super().bad_rows

    def __len__(self) -> int:
        return min(self._count, super().__len__())

    def find_source(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.sources[0], index


def check_columns_exist(sources: Sequence[Source]) -> None:
    """Raise DataError for a column of data.columns that none of the files has."""
    files = [file for source in sources for file in (source.sources if isinstance(source, WrappedSource) else [source])]
    absent: list[dict[str, str]] = [getattr(file, "missing_columns", {}) for file in files]
    for name in sorted(set.intersection(*map(set, absent)) if absent else ()):
        raise DataError(Fault(f"data.columns.{name}", f"no file has the column '{name}'", absent[0][name]))


def list_names(source: Source) -> list[str]:
    """Return the name that each file or dataset of a source has in messages."""
    if isinstance(source, WrappedSource):
        return [name for part in source.sources for name in list_names(part)]
    return [str(getattr(source, "name", ""))]


def list_unread(source: Source) -> list[str]:
    """Return a sentence for each folder of a source with files that are not read, as it is now."""
    if isinstance(source, WrappedSource):
        return [sentence for part in source.sources for sentence in list_unread(part)]
    return list(filter(None, [getattr(source, "unread", "")]))


def cut_source(source: Source, max_samples: int | None) -> Source:
    """Return the first `max_samples` records of a source; the source itself for None, so that its digest stays."""
    return HeadSource(source, max_samples) if max_samples else source


class ConcatSource(WrappedSource):
    """Several sources, one after another."""

    def __init__(self, sources: Sequence[Source]) -> None:
        digests = " ".join(source.digest for source in sources)
        super().__init__(sources, hashlib.sha256(digests.encode()).hexdigest())

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Records of each source."""
        return tuple(len(source) for source in self.sources)

    @cached_property
    def _cumulative_sizes(self) -> list[int]:
        return list(itertools.accumulate(self.sizes))

    def find_source(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # To the right of equal ends: an empty source holds no record.
        at = bisect.bisect_right(self._cumulative_sizes, index)
        return self.sources[at], index - self._cumulative_sizes[at] + self.sizes[at]

    def __len__(self) -> int:
        return self._cumulative_sizes[-1] if self._cumulative_sizes else 0


class LazySource:
    """A file with known digest and size, opened when a record is first read. Thread-safe."""

    def __init__(
        self, path: Path, load: Callable[[], Source], digest: str, count: int, missing_columns: dict[str, str]
    ) -> None:
        """Take what an earlier `load` of the unchanged file has found."""
        self._path, self._load, self.digest, self._count = path, load, digest, count
        self.name = display_path(path)
        self.missing_columns, self.base_dir = missing_columns, path.parent
        self._lock, self._loaded = threading.Lock(), cast("Source | None", None)

    def _get_source(self) -> Source:
        with self._lock:
            # Inside the lock, so that several threads load it once.
            if self._loaded is None:
                source = self._load()
                # The token cache was chosen by the known digest: other records must not be mixed in.
                if (source.digest, len(source)) != (self.digest, self._count):
                    raise DataError(
                        f"{display_path(self._path)}: the file was changed while it was in use; start again"
                    )
                self._loaded = source
        return self._loaded

    @property
    def bad_rows(self) -> list[BadRow]:
        return self._get_source().bad_rows

    def bad_rows_before(self, index: int) -> list[BadRow]:
        return self._get_source().bad_rows_before(index)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._get_source()[index]

    def location(self, index: int) -> str:
        return self._get_source().location(index)

    def get_base_dir(self, index: int) -> Path:
        return self.base_dir
