"""The token cache: examples as columns on disk, memory-mapped, whole or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from dstrain.cache_dir import cache_root as cache_root
from dstrain.cache_dir import hash_key as hash_key
from dstrain.console import log_stderr
from dstrain.data.cache.columns import ColumnWriter
from dstrain.data.records import BadRow, Example
from dstrain.data.vision.image_index import IMAGE_INDEX_FILE as ALBUM
from dstrain.data.vision.image_index import ImageIndex
from dstrain.errors import DataError
from dstrain.files import atomic_folder, is_occupied, partial_path, remove_stale_partials
from dstrain.units import format_duration

_POLL_SECONDS = 0.1


@dataclass
class BuildReport:
    """What came of reading a source."""

    read: int = 0
    kept: int = 0
    bad: list[BadRow] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    """Name of a cut -> examples that were cut that way."""
    sizes: list[int] = field(default_factory=list)
    """Records of each joined source, so that none need be opened where the store is whole; empty: not known."""


Build = Callable[[BuildReport], Iterable[Sequence[Example]]]
"""Yields examples in chunks, filling in the report as it goes."""


@dataclass(frozen=True)
class WithExtraFiles:
    """A `Build`, or an `Encode` for `prepare`, that also leaves files of its own in the store's folder."""

    function: Callable[..., Any]
    """Called as the build or the encoder itself."""
    write_extra_files: Callable[[Path], list[str]]
    """Writes them into the folder, once all examples are there; their names."""

    def __call__(self, argument: Any) -> Any:
        return self.function(argument)


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
        self.report = BuildReport(**{**meta["report"], "bad": [BadRow(*row) for row in meta["report"]["bad"]]})
        self._count = int(meta["count"])
        self.record_indices = _open_column(folder / "sample.npy")
        self._scalars = {name: _open_column(folder / f"{name}.npy") for name in meta["scalars"]}
        self._ragged = {
            name: (_open_column(folder / f"{name}.npy"), _open_column(folder / f"{name}.ends.npy"))
            for name in meta["ragged"]
        }
        self.image_index = ImageIndex(folder) if ALBUM in meta["files"] else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Arrays by column, floats by column, and `sample`: the record's index in its source."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        example: dict[str, Any] = {"sample": int(self.record_indices[index])}
        for name, (values, ends) in self._ragged.items():
            example[name] = values[ends[index - 1] if index else 0 : ends[index]]
        if self.image_index is not None:
            shown = self.image_index.select(example.pop("images"))
            example |= {"images": shown} if len(self.image_index) else {}
        return example | {name: float(values[index]) for name, values in self._scalars.items()}

    @property
    def ragged_columns(self) -> list[str]:
        """The ragged columns."""
        return [*self._ragged]

    def column_lengths(self, column: str) -> np.ndarray:
        """The length of every example's sequence in a ragged column."""
        return np.diff(self._ragged[column][1], prepend=0)

    def max_lengths(self, rows: np.ndarray) -> np.ndarray:
        """(N,) length of the longest sequence of each of these rows, (N,); their images are counted as tokens already."""
        ends = [ends for name, (_, ends) in self._ragged.items() if name != "images"]
        starts = [np.where(rows > 0, column[rows - 1], 0) for column in ends]
        sizes = [column[rows] - start for column, start in zip(ends, starts, strict=True)]
        return np.max([np.zeros(len(rows), dtype=np.int64), *sizes], axis=0)

    def count_per_source(self, source_sizes: Sequence[int]) -> tuple[int, ...]:
        """How many examples each of the joined sources, of these sizes, left in the store."""
        ends = np.searchsorted(self.record_indices, np.cumsum((0, *source_sizes)))
        return tuple(int(count) for count in np.diff(ends))


def _open_column(path: Path) -> np.ndarray:
    # Without the view, every slice of a memmap pays for building a memmap; an empty file cannot be mapped.
    if path.stat().st_size <= 128:
        return np.load(path, allow_pickle=False)
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def write_store(folder: Path, key: Mapping[str, Any], build: Build) -> None:
    """Write what `build` yields into an empty folder; meta.json comes last."""
    report, columns = BuildReport(), ColumnWriter(folder)
    for chunk in build(report):
        columns.append(chunk)
    meta = {"key": dict(key), **columns.close(), "report": asdict(report)}
    if isinstance(build, WithExtraFiles):
        meta["files"] |= {name: (folder / name).stat().st_size for name in build.write_extra_files(folder)}
    with (folder / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def load_or_build_store(
    folder: Path,
    key: Mapping[str, Any],
    build: Build,
    echo: Callable[[str], None] = log_stderr,
    log_interval: float = 30.0,
) -> TokenStore:
    """The store under this key, built first where it is absent or damaged.

    One process builds, in a folder that is renamed when it is whole; the others wait for its lock, telling
    every `every` seconds for whom. Never a collective: it may take longer than a process group waits.
    """
    place = folder / hash_key(key)
    if (store := _open_if_valid(place, echo)) is not None:
        return store
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _acquire_build_lock(place, echo, log_interval):
            store = _open_if_valid(place, lambda line: None)
            return _build_store(place, key, build) if store is None else store
    except OSError as fault:
        mend = "where that folder is full or read-only, set DSTRAIN_CACHE to another"
        raise DataError(f"the token cache {place} cannot be built: {fault}; {mend}") from fault


@contextlib.contextmanager
def _acquire_build_lock(store_path: Path, echo: Callable[[str], None], log_interval: float) -> Iterator[None]:
    """Inside, this process holds the store's lock; or none, where the file system has no locks: see `_build`."""
    from filelock import FileLock, Timeout

    lock, owner = FileLock(f"{store_path}.lock"), Path(f"{store_path}.owner")
    if why := _find_lock_error(Path(f"{store_path}.lock")):
        echo(
            f"{store_path.parent} has no file locks ({why}): processes that start at the same time each build {store_path.name}"
        )
        yield
        return
    while True:
        try:
            lock.acquire(timeout=log_interval, poll_interval=_POLL_SECONDS)
            break
        except Timeout:
            echo(f"waiting for the token cache {store_path}, {_describe_owner(owner)}")
    try:
        owner.write_text(json.dumps([os.getpid(), socket.gethostname(), time.time()]), encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it ends with the process
            lock.release()


def _find_lock_error(path: Path) -> str:
    """What the system says to a lock where it has none; empty where it has. (filelock 3 waits for ever in that case.)"""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as fault:
        return (fault.strerror or str(fault)) if fault.errno in _NO_LOCK_ERRNOS else ""
    finally:
        os.close(descriptor)
    return ""


_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@contextlib.contextmanager
def check_images_once(checked: Iterable[str] = ()) -> Iterator[set[str]]:
    """Inside, the images of each store are looked at once, and those of `known` stores not again: a look is a call to the
    file server for every image. Gives the stores whose images are as they were.
    """
    token = _checked_stores.set(set(checked))
    try:
        yield cast("set[str]", _checked_stores.get())
    finally:
        _checked_stores.reset(token)


_checked_stores: ContextVar[set[str] | None] = ContextVar("checked", default=None)


def _open_if_valid(store_path: Path, echo: Callable[[str], None]) -> TokenStore | None:
    """The store, where its files are whole and its images are those that were prepared."""
    try:
        store = TokenStore(store_path)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    checked = _checked_stores.get()
    if store.image_index is None or (checked is not None and str(store_path) in checked):
        return store
    if reason := store.image_index.find_change():
        echo(f"the token cache {store_path} is built again: {reason}")
        return None
    if checked is not None:
        checked.add(str(store_path))
    return store


def _build_store(store_path: Path, key: Mapping[str, Any], build: Build) -> TokenStore:
    """Under the lock, which keeps nobody out where it is local to a host (Lustre's localflock, NFS's local_lock): each
    builder has a folder of its own, and the first to finish gives it the store's name.
    """
    remove_stale_partials(store_path, unowned=True)
    with atomic_folder(store_path, _publish_store) as partial:
        partial.mkdir()
        write_store(partial, key, build)
    return TokenStore(store_path)


def _publish_store(partial: Path, store_path: Path) -> None:
    """Give the store its name, or leave a complete one that another process has built; remove a damaged one."""
    while True:
        try:
            os.rename(partial, store_path)
            return
        except OSError as fault:
            if not is_occupied(fault):
                raise
        if _open_if_valid(store_path, lambda line: None) is not None:
            return
        aside = partial_path(store_path)
        with contextlib.suppress(FileNotFoundError):  # someone else took it away
            store_path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _describe_owner(owner: Path) -> str:
    try:
        process, host, began = json.loads(owner.read_text(encoding="utf-8"))
        return f"which process {process} on {host} has been building for {format_duration(time.time() - began)}"
    except (OSError, ValueError):
        return "which another process is building"
