"""Records by index, from files and from the hub: one source, the first records of it, and several joined."""

from __future__ import annotations

import bisect
import difflib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from dstrain.cache_dir import file_state, recall, remember
from dstrain.config.schema import HeldOutConfig
from dstrain.data.sources.base import BadRow, Source, show_path, why_no_file
from dstrain.data.sources.files import KINDS, ending
from dstrain.data.sources.hub import HubRows, Part, is_hub_name, parse_part
from dstrain.errors import DataError

__all__ = ["BadRow", "Deferred", "First", "Joined", "Source", "open_source", "show_path"]

READ_AS = 2
"""Raise it when the same file would give other records, or another digest: what is known of files is then forgotten."""


class First:
    """The first so many records of a source."""

    def __init__(self, source: Source, count: int) -> None:
        self._source, self._count = source, count
        self.digest = hashlib.sha256(f"{source.digest} {count}".encode()).hexdigest()

    @property
    def bad(self) -> list[BadRow]:
        return self._source.bad

    def __bool__(self) -> bool:
        """Whether it has records, without counting them."""
        return bool(self._count and self._source)

    def __len__(self) -> int:
        return min(self._count, len(self._source))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
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
        self.digest = hashlib.sha256(" ".join(source.digest for source in self.sources).encode()).hexdigest()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Records of each source."""
        return tuple(len(source) for source in self.sources)

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(self.sizes))

    @property
    def bad(self) -> list[BadRow]:
        return [row for source in self.sources for row in source.bad]

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


class Deferred:
    """A file whose records an earlier start has read: it is opened where one of them is asked for. Thread-safe."""

    def __init__(self, path: Path, read: Callable[[], Source], digest: str, count: int) -> None:
        """`digest` and `count`: what `read` gave when the file was as it is now."""
        self._path, self._read, self.digest, self._count = path, read, digest, count
        self._opening, self._opened = threading.Lock(), cast("Source | None", None)

    def _source(self) -> Source:
        with self._opening:
            if self._opened is None:
                source = self._read()
                if (source.digest, len(source)) != (self.digest, self._count):
                    raise DataError(f"{show_path(self._path)}: the file was changed while it was in use; start again")
                self._opened = source
        return self._opened

    @property
    def bad(self) -> list[BadRow]:
        return self._source().bad

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source()[index]

    def where(self, index: int) -> str:
        return self._source().where(index)

    def folder_of(self, index: int) -> Path:
        return self._path.parent


def open_source(what: str | Path | HeldOutConfig, columns: Mapping[str, str] | None = None) -> Source:
    """The records of a .jsonl, .json (both also .gz) or .parquet file, or of a dataset on the hub.

    `columns` renames names in the data to names the format knows. What the recipe says of a source is given whole, so
    that its split counts; in a text a split may follow the dataset's name: `org/name:test`. Raises DataError.
    """
    part = None
    if isinstance(what, HeldOutConfig):
        if is_hub_name(what.path):
            part = Part(what.path, what.split or what.usual_split, what.name)
        what = what.path
    path = Path(what)
    try:
        path = path.expanduser()
        if path.is_file():
            return _open_file(path, columns or {})
    except RuntimeError as fault:
        raise DataError(f"{path} begins with ~, and no home folder is known; write it out, or set HOME") from fault
    except OSError as fault:
        raise DataError(f"{path} cannot be read ({fault.strerror}); check the path and its permissions") from fault
    part = part or parse_part(str(what))
    if part is None or path.is_dir():
        raise DataError(_missing(path))
    return HubRows(part, columns or {})


def _open_file(path: Path, columns: Mapping[str, str]) -> Source:
    kind = KINDS.get(ending(path.name))
    if kind is None:
        raise DataError(f"{show_path(path)} ends in '{ending(path.name)}'; data files end in {_endings()}")
    if not path.stat().st_size:
        raise DataError(f"{show_path(path)} is empty; check the path or regenerate the file")

    def read() -> Source:
        source = kind(path, columns)
        if not len(source) and not source.bad:
            raise DataError(
                f"{show_path(path)} has no records, only blank lines; check the path or regenerate the file"
            )
        return source

    what = {"records": READ_AS, "columns": dict(columns)}
    if (known := recall(path, what)) is not None:
        return Deferred(path, read, *known)
    began, state = time.time_ns(), file_state(path)
    source = read()
    remember(path, what, [source.digest, len(source)], began, state)
    return source


def _endings() -> str:
    *most, last = KINDS
    return f"{', '.join(most)} or {last}"


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name a .jsonl, .json or .parquet file in it"
    if why := why_no_file(path):
        return f"{path} {why}; name a .jsonl, .json or .parquet file"
    folder = path.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file()) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    mend = f"near it: {', '.join(near)}" if near else f"{folder} has none like it, or does not exist"
    return f"there is no file {path} (looked from {Path.cwd()}); {mend}"
