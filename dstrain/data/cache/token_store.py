"""The token cache: examples as columns on disk, memory-mapped, whole or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from dstrain.cache_dir import cache_root as cache_root
from dstrain.cache_dir import key_name as key_name
from dstrain.cache_dir import partial_path, remove_abandoned
from dstrain.data.cache.columns import ColumnWriter, Example
from dstrain.data.sources.open import BadRow
from dstrain.data.vision.image_index import FILE as ALBUM
from dstrain.data.vision.image_index import Album
from dstrain.errors import DataError
from dstrain.units import show_duration

_POLL_SECONDS = 0.1


@dataclass
class Report:
    """What came of reading a source."""

    read: int = 0
    kept: int = 0
    bad: list[BadRow] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    """Name of a cut -> examples that were cut that way."""
    sizes: list[int] = field(default_factory=list)
    """Records of each joined source, so that none need be opened where the store is whole; empty: not known."""


Build = Callable[[Report], Iterable[Sequence[Example]]]
"""Yields examples in chunks, filling in the report as it goes."""


@dataclass(frozen=True)
class WithFiles:
    """A `Build`, or an `Encode` for `prepare`, that also leaves files of its own in the store's folder."""

    make: Callable[..., Any]
    """Called as the build or the encoder itself."""
    beside: Callable[[Path], list[str]]
    """Writes them into the folder, once all examples are there; their names."""

    def __call__(self, asked: Any) -> Any:
        return self.make(asked)


class TokenStore:
    """Read-only examples: ragged int32 columns, float64 scalars and the sample ids. Thread-safe.

    Where it has an album, the column `images` gives images that can be loaded, not their numbers; no example has it where
    none has an image.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder that `cached_store` wrote. Raises ValueError or OSError where it is not whole."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, size in meta["files"].items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{folder / name} has not the {size} bytes that were written")
        self.folder = folder
        self.report = Report(**{**meta["report"], "bad": [BadRow(*row) for row in meta["report"]["bad"]]})
        self._count = int(meta["count"])
        self.samples = _open(folder / "sample.npy")
        self._scalars = {name: _open(folder / f"{name}.npy") for name in meta["scalars"]}
        self._ragged = {
            name: (_open(folder / f"{name}.npy"), _open(folder / f"{name}.ends.npy")) for name in meta["ragged"]
        }
        self.album = Album(folder) if ALBUM in meta["files"] else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Arrays by column, floats by column, and `sample`: the record's index in its source."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        example: dict[str, Any] = {"sample": int(self.samples[index])}
        for name, (values, ends) in self._ragged.items():
            example[name] = values[ends[index - 1] if index else 0 : ends[index]]
        if self.album is not None:
            shown = self.album.pick(example.pop("images"))
            example |= {"images": shown} if len(self.album) else {}
        return example | {name: float(values[index]) for name, values in self._scalars.items()}

    @property
    def sequences(self) -> list[str]:
        """The ragged columns."""
        return [*self._ragged]

    def lengths(self, column: str) -> np.ndarray:
        """The length of every example's sequence in a ragged column."""
        return np.diff(self._ragged[column][1], prepend=0)

    def longest(self, rows: np.ndarray) -> np.ndarray:
        """(N,) length of the longest sequence of each of these rows, (N,); their images are counted as tokens already."""
        ends = [ends for name, (_, ends) in self._ragged.items() if name != "images"]
        starts = [np.where(rows > 0, column[rows - 1], 0) for column in ends]
        sizes = [column[rows] - start for column, start in zip(ends, starts, strict=True)]
        return np.max([np.zeros(len(rows), dtype=np.int64), *sizes], axis=0)

    def sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """How many examples each of the joined sources, of these sizes, left in the store."""
        ends = np.searchsorted(self.samples, np.cumsum((0, *sizes)))
        return tuple(int(count) for count in np.diff(ends))


def _open(path: Path) -> np.ndarray:
    # Without the view, every slice of a memmap pays for building a memmap; an empty file cannot be mapped.
    if path.stat().st_size <= 128:
        return np.load(path, allow_pickle=False)
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def write_store(folder: Path, key: Mapping[str, Any], build: Build) -> None:
    """Write what `build` yields into an empty folder; meta.json comes last."""
    report, columns = Report(), ColumnWriter(folder)
    for chunk in build(report):
        columns.append(chunk)
    meta = {"key": dict(key), **columns.close(), "report": asdict(report)}
    if isinstance(build, WithFiles):
        meta["files"] |= {name: (folder / name).stat().st_size for name in build.beside(folder)}
    with (folder / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def say(line: str) -> None:
    """To stderr, at once: stdout belongs to what was asked for."""
    print(line, file=sys.stderr, flush=True)


def cached_store(
    folder: Path, key: Mapping[str, Any], build: Build, echo: Callable[[str], None] = say, every: float = 30.0
) -> TokenStore:
    """The store under this key, built first where it is absent or damaged.

    One process builds, in a folder that is renamed when it is whole; the others wait for its lock, telling
    every `every` seconds for whom. Never a collective: it may take longer than a process group waits.
    """
    place = folder / key_name(key)
    if (store := _whole(place, echo)) is not None:
        return store
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(place, echo, every):
            store = _whole(place, lambda line: None)
            return _build(place, key, build) if store is None else store
    except OSError as fault:
        mend = "where that folder is full or read-only, set DSTRAIN_CACHE to another"
        raise DataError(f"the token cache {place} cannot be built: {fault}; {mend}") from fault


@contextlib.contextmanager
def _alone(place: Path, echo: Callable[[str], None], every: float) -> Iterator[None]:
    """Inside, this process holds the store's lock; or none, where the file system has no locks: see `_build`."""
    from filelock import FileLock, Timeout

    lock, owner = FileLock(f"{place}.lock"), Path(f"{place}.owner")
    if why := _lock_fault(Path(f"{place}.lock")):
        echo(f"{place.parent} has no file locks ({why}): processes that start at the same time each build {place.name}")
        yield
        return
    while True:
        try:
            lock.acquire(timeout=every, poll_interval=_POLL_SECONDS)
            break
        except Timeout:
            echo(f"waiting for the token cache {place}, {_read_owner(owner)}")
    try:
        owner.write_text(json.dumps([os.getpid(), socket.gethostname(), time.time()]), encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it ends with the process
            lock.release()


def _lock_fault(path: Path) -> str:
    """What the system says to a lock where it has none; empty where it has. (filelock 3 waits for ever in that case.)"""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as fault:
        return (fault.strerror or str(fault)) if fault.errno in _NO_LOCKS else ""
    finally:
        os.close(descriptor)
    return ""


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@contextlib.contextmanager
def images_checked(known: Iterable[str] = ()) -> Iterator[set[str]]:
    """Inside, the images of each store are looked at once, and those of `known` stores not again: a look is a call to the
    file server for every image. Gives the stores whose images are as they were.
    """
    token = _checked.set(set(known))
    try:
        yield cast("set[str]", _checked.get())
    finally:
        _checked.reset(token)


_checked: ContextVar[set[str] | None] = ContextVar("checked", default=None)


def _whole(place: Path, echo: Callable[[str], None]) -> TokenStore | None:
    """The store, where its files are whole and its images are those that were prepared."""
    try:
        store = TokenStore(place)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    checked = _checked.get()
    if store.album is None or (checked is not None and str(place) in checked):
        return store
    if reason := store.album.changed():
        echo(f"the token cache {place} is built again: {reason}")
        return None
    if checked is not None:
        checked.add(str(place))
    return store


def _build(place: Path, key: Mapping[str, Any], build: Build) -> TokenStore:
    """Under the lock, which keeps nobody out where it is local to a host (Lustre's localflock, NFS's local_lock): each
    builder has a folder of its own, and the first to finish gives it the store's name.
    """
    remove_abandoned(place)
    partial = partial_path(place)
    partial.mkdir()
    try:
        write_store(partial, key, build)
        return _publish(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, place: Path) -> TokenStore:
    """The store under its name: this one, or the whole one of a process that was sooner. What is damaged there is removed."""
    while True:
        try:
            partial.rename(place)
            return TokenStore(place)
        except OSError as fault:
            if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if (store := _whole(place, lambda line: None)) is not None:
            return store
        aside = partial_path(place)
        with contextlib.suppress(FileNotFoundError):  # someone else took it away
            place.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _read_owner(owner: Path) -> str:
    try:
        process, host, began = json.loads(owner.read_text(encoding="utf-8"))
        return f"which process {process} on {host} has been building for {show_duration(time.time() - began)}"
    except (OSError, ValueError):
        return "which another process is building"
