"""Images of a store: their files and hashes, copies from which the processor makes equal tensors."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy as shallow_copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.data.records import BadRecord
from dstrain.data.vision.image_io import DeferredImage, decode_image, read_content, resolve_image
from dstrain.errors import DataError
from dstrain.files import WatchedFile, atomic_write, display_path, stat_or_none

if TYPE_CHECKING:
    from PIL.Image import Image


# STORE/images.json       a row for each image, in the order of their positions, for each file that a
#                         record names but no example uses, and for each document that records were read from
# CACHE/ab/abcd…-0123….png    the copy of the image whose file has a sha256 that begins with abcd…; the sha256 of the copy
#                            begins with 0123…; each processor has its own CACHE


IMAGE_INDEX_FILE = "images.json"
RERUN_PREPARE = "run `dstrain prepare` again"
_CHECK_THREADS, _CHECK_CHUNK_SIZE = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEntry:
    """An image of a sample, a row of images.json. It is decoded by `load`."""

    path: str | None
    """Its file; None if its bytes are in the data, so that only the copy is a file."""
    bytes: int
    """Size of the file, or of the bytes."""
    mtime_ns: int
    sha256: str
    """Hash of the file's bytes."""
    width: int
    """Pixels of the image that `load` returns: of the copy if there is one."""
    height: int
    copy: str | None
    """The PNG in the cache that is loaded instead."""
    copy_bytes: int
    copy_sha256: str

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def has_copy(self) -> bool:
        """True if the image is loaded from the cache: smaller, or because it has no file outside of it."""
        return self.copy is not None

    @property
    def name(self) -> str:
        """The image's name in messages."""
        return display_path(Path(self.path)) if self.path else f"an image of {self.bytes} bytes within the data"

    def find_change(self) -> str | None:
        """Return what has changed, from the files' sizes and times, as a clause without the fix."""
        if self.path and (state := size_and_mtime(Path(self.path))) != (self.bytes, self.mtime_ns):
            if state is not None:
                return f"{self.name} has changed"
            if self.copy is None:  # with a copy, the original may be deleted
                return f"{self.name} is gone"
        if self.copy and (state := size_and_mtime(Path(self.copy)) or (0, 0))[0] != self.copy_bytes:
            return f"the copy of {self.name}, {self.copy}, is gone or damaged"
        return None

    def load(self, downscale: Callable[[Image], Image | None] | None = None) -> Image:
        """Return the image as RGB: from its copy, or from its file where the copy is not what was written.

        `downscale`: the function that made the copy. Raises DataError if neither holds the bytes that were prepared.
        """
        if self.copy and (content := read_if_unchanged(Path(self.copy), self.copy_sha256, is_copy=True)) is not None:
            return decode_image(content, self.name)
        if self.path and (content := read_if_unchanged(Path(self.path), self.sha256)) is not None:
            image = decode_image(content, self.name)
            if image.size == self.size:
                return image
            if downscale is not None and (smaller := downscale(image)) is not None and smaller.size == self.size:
                return smaller
        reason = self.find_change() or f"{self.copy or self.name} cannot be read, or is not what was prepared"
        raise DataError(f"{reason}; {RERUN_PREPARE}")


def read_if_unchanged(path: Path, sha256: str, *, is_copy: bool = False) -> bytes | None:
    """Return the bytes of a file; None if they have another hash, or cannot be read.

    `sha256`: their hash, or its first 32 digits. A copy with another hash is removed: the next start makes it again.
    """
    with contextlib.suppress(BadRecord):
        content, _ = read_content(path)
        if hashlib.sha256(content).hexdigest()[:32] == sha256[:32]:
            return content
        if is_copy:
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

        The original of a copy may be gone. Rejected images count too, since they may have been fixed, and
        the documents that images were made from.
        """
        files = [*self._entries, *self._rejected, *self._watched]
        parts = [files[start : start + _CHECK_CHUNK_SIZE] for start in range(0, len(files), _CHECK_CHUNK_SIZE)]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:  # a file server answers many requests at once
            changes = pool.map(lambda part: next(filter(None, (file.find_change() for file in part)), None), parts)
            return next(filter(None, changes), None)


_RESIZE_METHODS = ("resize", "center_crop")
"""Methods of transformers' image processors that reduce an image before its values are normalized."""


class ImageIndexWriter:
    """Reads images as records name them, each once, and caches downscaled copies."""

    def __init__(self, downscale: Callable[[Image], Image | None], cache_dir: Path) -> None:
        """Take a function that returns an equivalent smaller image or None, and a folder for its results only."""
        self._downscale, self._cache_dir = downscale, cache_dir
        self._entries: dict[str, ImageEntry | str] = {}
        """Absolute path, or hash of the bytes -> entry, or reason of a BadRecord."""
        self._locks: dict[str, threading.Lock] = {}
        self._copies: dict[Path, dict[str, str]] = {}
        """Folder of copies -> beginning of the image's hash -> name of its copy, as they were at first use."""
        self._lock = threading.Lock()
        self._positions: dict[ImageEntry, int] = {}
        self._rejected: dict[str, WatchedFile] = {}

    def get_entry(self, value: Any, folder: Path) -> ImageEntry:
        """Return the entry of an image in a record; decode, downscale and hash it if it is new.

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
        path = None if isinstance(source, bytes) or is_cached else Path(key)
        state = None
        if path:  # before the file is read, so that a change in between is noticed later
            self._rejected[key], state = WatchedFile.from_path(path), size_and_mtime(path)
        content, name = read_content(source)
        sha256 = hashlib.sha256(content).hexdigest()
        copy, png = self._find_copy(sha256)
        image = decode_image(png, str(copy)) if png else None
        if image is None:
            image = original = decode_image(content, name)
            downscaled = self._try_downscale(original, name)
            # Bytes inside the data have no file to be loaded from later: they get a copy too.
            if downscaled is not None or isinstance(source, bytes):
                image = downscaled or original
                copy, png = self._write_copy(image, sha256)
            elif is_cached:
                copy, png = Path(key), content
        return ImageEntry(
            path=str(path) if path else None,
            bytes=len(content),
            mtime_ns=state[1] if state else 0,
            sha256=sha256,
            width=image.width,
            height=image.height,
            copy=str(copy.absolute()) if copy else None,
            copy_bytes=len(png),
            copy_sha256=hashlib.sha256(png).hexdigest() if copy else "",
        )

    def _find_copy(self, sha256: str) -> tuple[Path | None, bytes]:
        """Return the copy of an earlier preparation and its bytes; (None, b"") if there is none that is as written."""
        folder = self._cache_dir / sha256[:2]
        with self._lock:
            if (names := self._copies.get(folder)) is None:
                found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
                names = self._copies[folder] = {name.partition("-")[0]: name for name in found if name.endswith(".png")}
        name = names.get(sha256[:32])
        png = read_if_unchanged(folder / name, Path(name).stem.partition("-")[2], is_copy=True) if name else None
        return (None, b"") if png is None else (folder / str(name), png)

    def _write_copy(self, image: Image, sha256: str) -> tuple[Path, bytes]:
        """Write the PNG atomically; return its path and its bytes."""
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        png = buffer.getvalue()
        copy = self._cache_dir / sha256[:2] / f"{sha256[:32]}-{hashlib.sha256(png).hexdigest()[:32]}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(copy, png)
        return copy, png

    def _try_downscale(self, image: Image, name: str) -> Image | None:
        try:
            return self._downscale(image)
        except (MemoryError, DataError):
            raise
        except Exception as fault:
            cause = f"{type(fault).__name__}: {fault}"
            problem = f"the model's image processor cannot use {name}, {image.width}x{image.height} pixels ({cause})"
            raise BadRecord(f"{problem}; change the image, or remove the record") from fault


def downscale_if_equivalent(image: Image, image_processor: Any) -> Image | None:
    """Return the RGB image after the processor's own resize or crop, if that is equivalent.

    It has fewer pixels, and every tensor that the processor makes of it is bit-equal to that of
    `image`, so that decoding and scaling are done once, when data is prepared. None if there is no
    such image. Raises the processor's errors for `image`.
    """
    from PIL.Image import fromarray

    recording, recorded = shallow_copy(image_processor), dict[str, np.ndarray]()
    for name in dir(type(image_processor)):
        if name.startswith("return_") and getattr(recording, name, None) is False:
            setattr(recording, name, True)  # such as rows and columns of tiles, which must be equal too

    def record(name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if name not in recorded and (pixels := _to_pixels(result)) is not None:
            recorded[name] = pixels
        return result

    for name in _RESIZE_METHODS:
        if callable(method := getattr(recording, name, None)):
            setattr(recording, name, partial(record, name, method))
    expected = recording(image)
    # The smallest equivalent image saves most disk space and decoding time.
    for pixels in sorted(recorded.values(), key=lambda pixels: pixels.shape[0] * pixels.shape[1]):
        # An image of one row or column would be refused when the copy is read.
        if pixels.shape[0] * pixels.shape[1] < image.width * image.height and min(pixels.shape[:2]) > 1:
            downscaled = fromarray(np.ascontiguousarray(pixels))
            with contextlib.suppress(Exception):  # the image is too small for it, or of a shape that it rejects
                if _is_equal(recording(downscaled), expected):
                    return downscaled
    return None


def _to_pixels(output: Any) -> np.ndarray | None:
    """Return a processor's image as (H, W, 3) uint8; None if the value is not a single RGB image."""
    pixels = np.asarray(output)
    if pixels.ndim == 4 and len(pixels) == 1:  # a batch of one
        pixels = pixels[0]
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        return None
    if pixels.shape[0] == 3:
        # Some processors put channels first.
        pixels = pixels.transpose(1, 2, 0)
    return pixels.copy() if pixels.shape[2] == 3 else None


def _is_equal(actual: Any, expected: Any) -> bool:
    """Return whether both have the same values, bit by bit, in the same shapes and types."""
    if isinstance(expected, Mapping):  # includes transformers' BatchFeature
        return {*actual} == {*expected} and all(_is_equal(actual[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(_is_equal(*pair) for pair in zip(actual, expected, strict=True))
    left, right = np.asarray(actual), np.asarray(expected)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
