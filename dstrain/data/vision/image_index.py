"""The images of one token store: which files they are, what they were, and where smaller copies of them lie.

STORE/images.json             a row for each image, in the order of their numbers, and for each file that was looked at in vain
CACHE/ab/abcd….png            what is kept of the image whose file has this sha256; CACHE belongs to one processor
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.data.formats.messages import BadRecord
from dstrain.data.sources.base import display_path
from dstrain.data.vision.image_io import decode_image, read_content, read_image, resolve_image
from dstrain.errors import DataError
from dstrain.files import atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_INDEX_FILE = "images.json"
RERUN_PREPARE = "run `dstrain prepare` again"
_CHECK_THREADS, _CHECK_CHUNK_SIZE = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEntry:
    """One image of an album."""

    path: str | None
    """Its file; None where its bytes stood in the data, so that there is only the copy."""
    bytes: int
    """Of the file, or of the bytes."""
    mtime_ns: int
    sha256: str
    """Of the file's bytes."""
    width: int
    """Pixels of the image that `load` gives: the copy where there is one."""
    height: int
    copy: str | None
    """The PNG that stands for it."""
    copy_bytes: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def name(self) -> str:
        """For messages."""
        return display_path(Path(self.path)) if self.path else f"an image of {self.bytes} bytes within the data"

    def find_change(self) -> str | None:
        """What is no more as it was, as a sentence without its mend; a look at the files' sizes and times."""
        if self.path and (state := _size_and_mtime(Path(self.path))) != (self.bytes, self.mtime_ns):
            if state is not None:
                return f"{self.name} is not the file that it was"
            if self.copy is None:
                return f"{self.name} is gone"
        if self.copy and (state := _size_and_mtime(Path(self.copy)) or (0, 0))[0] != self.copy_bytes:
            return f"the copy of {self.name}, {self.copy}, is gone or damaged"
        return None

    def load(self) -> Image:
        """The image as RGB. Raises DataError where what is kept of it has changed."""
        kept = Path(self.copy or self.path or "")
        if self.copy is None and (reason := self.find_change()):
            raise DataError(f"{reason}; {RERUN_PREPARE}")
        try:
            image = read_image(kept)
        except BadRecord as fault:
            raise DataError(f"{self.name} was whole once, and now: {fault.reason}; {RERUN_PREPARE}") from fault
        if image.size != self.size:
            raise DataError(f"{display_path(kept)} is not the image that it was; {RERUN_PREPARE}")
        return image


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedImage:
    """A file that records name and no example has: it is bad, or the record is. Mended, it makes another store."""

    path: str
    bytes: int | None
    """None where there was no such file."""
    ctime_ns: int | None
    """Other than the time of its content, it tells that a permission was given."""

    @classmethod
    def from_path(cls, path: Path) -> RejectedImage:
        found = _stat_or_none(path)
        return cls(path=str(path), bytes=found and found.st_size, ctime_ns=found and found.st_ctime_ns)

    def find_change(self) -> str | None:
        """As of a Picture."""
        name = display_path(Path(self.path))
        return (
            None
            if RejectedImage.from_path(Path(self.path)) == self
            else f"{name}, which could not be used, is another now"
        )


def _stat_or_none(path: Path) -> os.stat_result | None:
    """None where there is no such file."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _size_and_mtime(path: Path) -> tuple[int, int] | None:
    """Size and time of a file; None where it is gone."""
    found = _stat_or_none(path)
    return None if found is None else (found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class LazyImage:
    """An image of a sample, decoded when it is asked for."""

    image_index: ImageIndex
    position: int

    def load(self) -> Image:
        """The image as RGB. Raises DataError where it has changed."""
        return self.image_index.load(self.position)

    @property
    def has_copy(self) -> bool:
        """As `Album.copied`."""
        return self.image_index.has_copy(self.position)


def _find_first_change(entries: Iterable[ImageEntry | RejectedImage]) -> str | None:
    return next(filter(None, (file.find_change() for file in entries)), None)


class ImageIndex:
    """The images of a store, read-only. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open what `AlbumWriter` wrote. Raises OSError, ValueError, KeyError or TypeError where it is not whole."""
        rows = json.loads((folder / IMAGE_INDEX_FILE).read_text(encoding="utf-8"))
        self._entries = [ImageEntry(**row) for row in rows["images"]]
        self._rejected = [RejectedImage(**row) for row in rows["unused"]]
        self.digest = hashlib.sha256(" ".join(picture.sha256 for picture in self._entries).encode()).hexdigest()
        """Equal where all the images are, in the same order."""

    def __len__(self) -> int:
        return len(self._entries)

    def has_copy(self, position: int) -> bool:
        """Whether the image lies in the cache, smaller or because the data holds it itself."""
        return self._entries[position].copy is not None

    def load(self, position: int) -> Image:
        """The image as RGB. Raises DataError where it has changed."""
        return self._entries[position].load()

    def select(self, positions: Iterable[int]) -> list[LazyImage]:
        return [LazyImage(self, int(index)) for index in positions]

    def find_change(self) -> str | None:
        """The first image that is gone or other than it was, as a sentence without its mend.

        One whose copy is kept may be gone itself. One that could not be used counts too: it may have been mended.
        """
        files = [*self._entries, *self._rejected]
        parts = [files[start : start + _CHECK_CHUNK_SIZE] for start in range(0, len(files), _CHECK_CHUNK_SIZE)]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:  # a file server answers many questions at once
            return next(filter(None, pool.map(_find_first_change, parts)), None)


class ImageIndexWriter:
    """Reads images as records name them, each once, and keeps what is smaller."""

    def __init__(self, downscale: Callable[[Image], Image | None], cache_dir: Path) -> None:
        """`settle` makes a smaller image that says the same, or None; `cache` is a folder of its results alone."""
        self._downscale, self._cache_dir = downscale, cache_dir
        self._entry_by_source: dict[str, ImageEntry | str | Future[ImageEntry | str]] = {}
        """The file's path from the root, or the hash of bytes -> the image, or why it cannot be used, or who is finding out."""
        self._lock = threading.Lock()
        self._positions: dict[ImageEntry, int] = {}
        self._rejected: dict[str, RejectedImage] = {}

    def get_entry(self, value: Any, folder: Path) -> ImageEntry:
        """The image that a record names, decoded, settled and hashed where nobody did so before. Thread-safe.

        `folder` is where relative paths start. Raises BadRecord.
        """
        source = resolve_image(value, folder)
        # Links are followed each time anew: one that leads elsewhere later gives another image.
        key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else str(source.absolute())
        with self._lock:
            known = self._entry_by_source.get(key)
            if known is None:
                self._entry_by_source[key] = found = Future[ImageEntry | str]()
        if known is None:
            known = self._resolve_entry(source, key, found)
        elif isinstance(known, Future):
            known = known.result()
        if isinstance(known, str):
            raise BadRecord(known)
        return known

    def assign_position(self, entry: ImageEntry) -> int:
        """The picture's number in the album: they are given in the order of asking. Not thread-safe."""
        return self._positions.setdefault(entry, len(self._positions))

    def write(self, folder: Path) -> list[str]:
        """Write the list of images that have a number into a store's folder, a row a line; the names of the files written."""
        used = {picture.path for picture in self._positions}
        unused = [asdict(self._rejected[path]) for path in sorted(self._rejected) if path not in used]
        lists = {"images": [asdict(picture) for picture in self._positions], "unused": unused}
        parts = (f"{json.dumps(name)}: [{_format_rows(rows)}]" for name, rows in lists.items())
        with (folder / IMAGE_INDEX_FILE).open("w", encoding="utf-8") as file:
            file.write("{" + ",\n".join(parts) + "}\n")
            file.flush()
            os.fsync(file.fileno())
        return [IMAGE_INDEX_FILE]

    def _resolve_entry(self, source: Path | bytes, key: str, pending: Future[ImageEntry | str]) -> ImageEntry | str:
        """Find out for all that wait. Of a fault its words are kept: the fault itself would hold the file's content."""
        try:
            known: ImageEntry | str = self._build_entry(source, key)
        except BadRecord as fault:
            known = fault.reason
        except BaseException as fault:
            pending.set_exception(fault)
            raise
        self._entry_by_source[key] = known
        pending.set_result(known)
        return known

    def _build_entry(self, source: Path | bytes, key: str) -> ImageEntry:
        path = None if isinstance(source, bytes) else Path(key)
        state = None  # of before it is read: a change in between is then seen
        if path:
            self._rejected[key], state = RejectedImage.from_path(path), _size_and_mtime(path)
        content, name = read_content(source)
        sha256 = hashlib.sha256(content).hexdigest()
        copy = self._cache_dir / sha256[:2] / f"{sha256}.png"
        image = _read_cached_copy(copy)
        if image is None:
            whole = decode_image(content, name)
            image, smaller = whole, self._try_downscale(whole, name)
            if smaller is not None or path is None:
                image = smaller or whole
                _write_copy(image, copy)
        kept = _size_and_mtime(copy)
        return ImageEntry(
            path=str(path) if path else None,
            bytes=len(content),
            mtime_ns=state[1] if state else 0,
            sha256=sha256,
            width=image.width,
            height=image.height,
            copy=str(copy.absolute()) if kept else None,
            copy_bytes=kept[0] if kept else 0,
        )

    def _try_downscale(self, image: Image, name: str) -> Image | None:
        try:
            return self._downscale(image)
        except (MemoryError, DataError):
            raise
        except Exception as fault:
            cause = f"{type(fault).__name__}: {fault}"
            problem = f"the model's image processor cannot use {name}, {image.width}x{image.height} pixels ({cause})"
            raise BadRecord(f"{problem}; change the image, or remove the record") from fault


def _format_rows(rows: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def _read_cached_copy(copy: Path) -> Image | None:
    """The copy that an earlier preparation kept; None where there is none, or a damaged one."""
    try:
        return read_image(copy) if copy.is_file() else None
    except BadRecord:
        return None


def _write_copy(image: Image, copy: Path) -> None:
    """Write the PNG whole or not at all, whoever else writes it too."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(copy, lambda file: image.save(file, "PNG", compress_level=1))
