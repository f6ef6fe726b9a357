"""Images of a store: their files and hashes, and copies of those that are bytes within the data."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.data.records import BadRecord
from dstrain.data.vision.image_io import DeferredImage, decode_image, read_content, resolve_image
from dstrain.errors import DataError
from dstrain.files import WatchedFile, atomic_write, display_path, stat_or_none

if TYPE_CHECKING:
    from PIL.Image import Image


# STORE/images.json   a row for each image, in the order of their positions, for each file that a record names but no
#                     example uses, and for each document that records were read from
# CACHE/ab/abcd…      the bytes of an image that has no file of its own; abcd… is their sha256


IMAGE_INDEX_FILE = "images.json"
RERUN_PREPARE = "run `dstrain prepare` again"
_CHECK_THREADS, _CHECK_CHUNK_SIZE = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEntry:
    """An image of a sample, a row of images.json. It is decoded by `load`."""

    path: str
    """Its file: the one that the data names, or one in the cache."""
    is_cached: bool
    """True if it has no file outside of the cache: bytes within the data, or a page of a document."""
    bytes: int
    """Size of the file."""
    mtime_ns: int
    """0 for a file of the cache, which does not change."""
    sha256: str
    """Hash of the file's bytes."""
    width: int
    """Pixels of the image that `load` returns."""
    height: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def name(self) -> str:
        """The image's name in messages."""
        return f"an image of {self.bytes} bytes within the data" if self.is_cached else display_path(Path(self.path))

    def find_change(self) -> str | None:
        """Return what has changed, from the file's size and time, as a clause without the fix."""
        state = size_and_mtime(Path(self.path))
        if self.is_cached:
            is_complete = state is not None and state[0] == self.bytes
            return None if is_complete else f"the copy of {self.name}, {self.path}, is gone or damaged"
        if state is None:
            return f"{self.name} is gone"
        return None if state == (self.bytes, self.mtime_ns) else f"{self.name} has changed"

    def load(self) -> Image:
        """Return the image as RGB. Raises DataError if the file does not hold the bytes that were prepared."""
        content = read_if_unchanged(Path(self.path), self.sha256, remove_other=self.is_cached)
        if content is not None:
            return decode_image(content, self.name)
        reason = self.find_change() or f"{self.path} cannot be read, or is not what was prepared"
        raise DataError(f"{reason}; {RERUN_PREPARE}")


def read_if_unchanged(path: Path, sha256: str, remove_other: bool = False) -> bytes | None:
    """Return the bytes of a file; None if they have another hash, or cannot be read.

    `remove_other`: remove a file with another hash, so that the next start makes it again.
    """
    with contextlib.suppress(BadRecord):
        content, _ = read_content(path)
        if hashlib.sha256(content).hexdigest() == sha256:
            return content
        if remove_other:
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def size_and_mtime(path: Path) -> tuple[int, int] | None:
    """Return the size and mtime of a file; None if it does not exist."""
    found = stat_or_none(path)
    return None if found is None else (found.st_size, found.st_mtime_ns)


class ImageIndex:
    """The images of a store, read-only. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read what `ImageIndexWriter` wrote.

        Raises OSError, ValueError, KeyError or TypeError if it is incomplete.
        """
        rows = json.loads((folder / IMAGE_INDEX_FILE).read_text(encoding="utf-8"))
        self._entries = [ImageEntry(**row) for row in rows["images"]]
        self._rejected = [WatchedFile(**row) for row in rows["unused"]]
        self._watched = [WatchedFile(**row) for row in rows.get("watched", ())]
        self.digest = hashlib.sha256(" ".join(entry.sha256 for entry in self._entries).encode()).hexdigest()
        """Equal for equal images in the same order."""

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, position: int) -> ImageEntry:
        return self._entries[position]

    def find_change(self) -> str | None:
        """Return the first image that is gone or has changed, as a clause without the fix.

        Rejected images count too, since they may have been fixed, and the documents that images were made from.
        """
        files = [*self._entries, *self._rejected, *self._watched]
        parts = [files[start : start + _CHECK_CHUNK_SIZE] for start in range(0, len(files), _CHECK_CHUNK_SIZE)]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:  # a file server answers many requests at once
            changes = pool.map(lambda part: next(filter(None, (file.find_change() for file in part)), None), parts)
            return next(filter(None, changes), None)


class ImageIndexWriter:
    """Reads images as records name them, each once, and writes those without a file into the cache."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._entries: dict[str, ImageEntry | str] = {}
        """Absolute path, or hash of the bytes -> entry, or reason of a BadRecord."""
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._positions: dict[ImageEntry, int] = {}
        self._rejected: dict[str, WatchedFile] = {}

    def get_entry(self, value: Any, folder: Path) -> ImageEntry:
        """Return the entry of an image in a record; decode and hash it if it is new.

        `folder`: where relative paths start. Thread-safe. Raises BadRecord.
        """
        source = resolve_image(value, folder)
        # Links are not resolved in the key: one that later leads to another file gives another image.
        key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else str(source.absolute())
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # other threads decode other images meanwhile
            if key not in self._entries:
                try:
                    self._entries[key] = self._build_entry(source, key, isinstance(value, DeferredImage))
                except BadRecord as fault:
                    # Not the exception itself, whose traceback would keep the file's content in memory.
                    self._entries[key] = fault.reason
        known = self._entries[key]
        if isinstance(known, str):
            raise BadRecord(known)
        return known

    def assign_position(self, entry: ImageEntry) -> int:
        """Return the entry's position in the index, assigned in the order of calls. Not thread-safe."""
        return self._positions.setdefault(entry, len(self._positions))

    def write(self, folder: Path, watched: Iterable[WatchedFile] = ()) -> None:
        """Write the images that have a position into a store's folder, and other files that the examples depend on."""
        used = {entry.path for entry in self._positions}
        unused = [asdict(self._rejected[path]) for path in sorted(self._rejected) if path not in used]
        lists = {"images": [asdict(entry) for entry in self._positions], "unused": unused}
        lists["watched"] = [asdict(file) for file in sorted(watched, key=lambda file: file.path)]
        (folder / IMAGE_INDEX_FILE).write_text(json.dumps(lists), encoding="utf-8")

    def _build_entry(self, source: Path | bytes, key: str, is_cached: bool) -> ImageEntry:
        """Return the entry of an image. `is_cached`: its file is in the cache, such as a page of a document."""
        state = None
        if not (isinstance(source, bytes) or is_cached):
            # Before the file is read, so that a change in between is noticed later.
            self._rejected[key], state = WatchedFile.from_path(Path(key)), size_and_mtime(Path(key))
        content, name = read_content(source)
        sha256 = hashlib.sha256(content).hexdigest()
        image = decode_image(content, name)
        return ImageEntry(
            path=self._write_copy(content, sha256) if isinstance(source, bytes) else key,
            is_cached=isinstance(source, bytes) or is_cached,
            bytes=len(content),
            mtime_ns=state[1] if state else 0,
            sha256=sha256,
            width=image.width,
            height=image.height,
        )

    def _write_copy(self, content: bytes, sha256: str) -> str:
        """Write the bytes of an image atomically, if they are not there; return the file's absolute path."""
        copy = self._cache_dir.absolute() / sha256[:2] / sha256
        if read_if_unchanged(copy, sha256) is None:
            copy.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(copy, content)
        return str(copy)
