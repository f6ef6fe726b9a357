"""The writer of an image index: decodes, hashes and downscales each image once."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.data.records import BadRecord
from dstrain.data.vision.image_index import (
    IMAGE_INDEX_FILE,
    ImageEntry,
    RejectedImage,
    size_and_mtime,
)
from dstrain.data.vision.image_io import decode_image, read_content, read_image, resolve_image
from dstrain.errors import DataError
from dstrain.files import WatchedFile, atomic_write

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageIndexWriter:
    """Reads images as records name them, each once, and caches downscaled copies."""

    def __init__(self, downscale: Callable[[Image], Image | None], cache_dir: Path) -> None:
        """Take a function that returns an equivalent smaller image or None, and a folder for its results only."""
        self._downscale, self._cache_dir = downscale, cache_dir
        self._entry_by_source: dict[str, ImageEntry | str | Future[ImageEntry | str]] = {}
        """Absolute path, or hash of the bytes -> entry, reason of a BadRecord, or Future while a thread works on it."""
        self._lock = threading.Lock()
        self._positions: dict[ImageEntry, int] = {}
        self._rejected: dict[str, RejectedImage] = {}
        self._watched: dict[str, WatchedFile] = {}

    def get_entry(self, value: Any, folder: Path) -> ImageEntry:
        """Return the entry of an image in a record; decode, downscale and hash it if it is new.

        `folder`: where relative paths start. Thread-safe. Raises BadRecord.
        """
        source = resolve_image(value, folder)
        # Links are not resolved in the key: one that later leads to another file gives another image.
        key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else str(source.absolute())
        with self._lock:
            known = self._entry_by_source.get(key)
            if known is None:
                self._entry_by_source[key] = pending = Future[ImageEntry | str]()
        if known is None:
            # Outside the lock: other threads decode other images meanwhile.
            known = self._resolve_entry(source, key, pending)
        elif isinstance(known, Future):
            known = known.result()
        if isinstance(known, str):
            raise BadRecord(known)
        return known

    def assign_position(self, entry: ImageEntry) -> int:
        """Return the entry's position in the index, assigned in the order of calls. Not thread-safe."""
        return self._positions.setdefault(entry, len(self._positions))

    def watch(self, files: Iterable[WatchedFile]) -> None:
        """Add files that the examples depend on besides their images."""
        self._watched |= {file.path: file for file in files}

    def write(self, folder: Path) -> list[str]:
        """Write the images that have a position into a store's folder, one per line.

        Returns the names of the files written.
        """
        used = {entry.path for entry in self._positions}
        unused = [asdict(self._rejected[path]) for path in sorted(self._rejected) if path not in used]
        lists = {"images": [asdict(entry) for entry in self._positions], "unused": unused}
        lists["watched"] = [asdict(self._watched[path]) for path in sorted(self._watched)]
        parts = (f"{json.dumps(name)}: [{_format_rows(rows)}]" for name, rows in lists.items())
        with (folder / IMAGE_INDEX_FILE).open("w", encoding="utf-8") as file:
            file.write("{" + ",\n".join(parts) + "}\n")
            file.flush()
            os.fsync(file.fileno())
        return [IMAGE_INDEX_FILE]

    def _resolve_entry(self, source: Path | bytes, key: str, pending: Future[ImageEntry | str]) -> ImageEntry | str:
        """Build the entry for all threads that wait for it; return it, or the reason of a BadRecord.

        The exception itself is not stored, because its traceback would keep the file's content in memory.
        """
        try:
            known: ImageEntry | str = self._build_entry(source, key)
        except BadRecord as fault:
            known = fault.reason
        # Threads that wait for the Future must not wait forever.
        except BaseException as fault:
            pending.set_exception(fault)
            raise
        self._entry_by_source[key] = known
        pending.set_result(known)
        return known

    def _build_entry(self, source: Path | bytes, key: str) -> ImageEntry:
        path = None if isinstance(source, bytes) else Path(key)
        state = None
        if path:  # before the file is read, so that a change in between is noticed later
            self._rejected[key], state = RejectedImage.from_path(path), size_and_mtime(path)
        content, name = read_content(source)
        sha256 = hashlib.sha256(content).hexdigest()
        copy = self._cache_dir / sha256[:2] / f"{sha256}.png"
        image = _read_cached_copy(copy)
        if image is None:
            image = original = decode_image(content, name)
            smaller = self._try_downscale(original, name)
            # Bytes inside the data have no file to be loaded from later: they get a copy too.
            if smaller is not None or path is None:
                image = smaller or original
                _write_copy(image, copy)
        cached = size_and_mtime(copy)
        return ImageEntry(
            path=str(path) if path else None,
            bytes=len(content),
            mtime_ns=state[1] if state else 0,
            sha256=sha256,
            width=image.width,
            height=image.height,
            copy=str(copy.absolute()) if cached else None,
            copy_bytes=cached[0] if cached else 0,
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
    """Return the cached copy of an earlier preparation; None if there is none or it is damaged."""
    try:
        return read_image(copy) if copy.is_file() else None
    except BadRecord:
        return None


def _write_copy(image: Image, copy: Path) -> None:
    """Write the PNG atomically."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(copy, lambda file: image.save(file, "PNG", compress_level=1))
