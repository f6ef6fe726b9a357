"""Index of a token store's images: files, hashes and downscaled copies."""

# STORE/images.json       a row for each image, in the order of their positions, for each file that a
#                         record names but no example uses, and for each document that records were read from
# CACHE/ab/abcd…-0123….png    the copy of the image whose file has a sha256 that begins with abcd…; the sha256 of the copy
#                            begins with 0123…; each processor has its own CACHE

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.data.records import BadRecord
from dstrain.data.vision.image_io import decode_image, read_content
from dstrain.errors import DataError
from dstrain.files import WatchedFile, display_path, stat_or_none

if TYPE_CHECKING:
    from PIL.Image import Image

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
