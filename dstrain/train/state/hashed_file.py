"""Files with a hash for each block: taken while they are written, compared with whatever is read."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dstrain.errors import CheckpointError

BLOCK_BYTES = 4 << 20
"""Bytes of a block."""
MAX_CACHED_BLOCKS = 4
"""Blocks of a file that a reader keeps."""
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")

FileEntry = dict[str, Any]
"""{"size": bytes, "sha256": [one hash per block]}"""


class HashedFileWriter:
    """A file being written; `entry` is there once it is closed and on the disk."""

    entry: FileEntry

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._hashes: list[str] = []
        self._block_hash = hashlib.sha256()
        self._bytes_in_block = 0

    def write(self, content: bytes | memoryview) -> None:
        """Write and hash."""
        view = memoryview(content).cast("B")
        self._file.write(view)
        while len(view):
            part = view[: BLOCK_BYTES - self._bytes_in_block]
            self._block_hash.update(part)
            self._bytes_in_block += len(part)
            view = view[len(part) :]
            if self._bytes_in_block == BLOCK_BYTES:
                self._finish_block()

    def _finish_block(self) -> None:
        self._hashes.append(self._block_hash.hexdigest())
        self._block_hash, self._bytes_in_block = hashlib.sha256(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                size = self._file.tell()
                if self._bytes_in_block or not size:
                    self._finish_block()
                self.entry = {"size": size, "sha256": self._hashes}
        finally:
            self._file.close()


def write_hashed_file(path: Path, content: bytes) -> FileEntry:
    """Write a whole file; returns its size and hashes."""
    with HashedFileWriter(path) as file:
        file.write(content)
    return file.entry


class HashedFileReader:
    """A file whose blocks are compared with their hashes as they are read. Raises CheckpointError where one differs."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.path, self.size, self._hashes = path, int(entry["size"]), entry["sha256"]
        self._cached_blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, offset: int, length: int) -> bytearray:
        """Bytes from `begin` on."""
        if offset < 0 or offset + length > self.size:
            raise CheckpointError(f"{self.path}: names values beyond its end; choose another checkpoint")
        found = bytearray()
        while len(found) < length:
            index, skip = divmod(offset + len(found), BLOCK_BYTES)
            found += memoryview(self.read_block(index))[skip : skip + length - len(found)]
        return found

    def read_block(self, index: int) -> bytes:
        """One block, as it was written."""
        if index in self._cached_blocks:
            self._cached_blocks.move_to_end(index)
            return self._cached_blocks[index]
        try:
            with self.path.open("rb") as file:
                file.seek(index * BLOCK_BYTES)
                content = file.read(BLOCK_BYTES)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read ({error.strerror}); choose another checkpoint"
            ) from error
        if hashlib.sha256(content).hexdigest() != self._hashes[index]:
            raise CheckpointError(
                f"{self.path}: is not what was written, the sha256 of bytes {index * BLOCK_BYTES} to "
                f"{index * BLOCK_BYTES + len(content)} differs; choose another checkpoint"
            )
        self._cached_blocks[index] = content
        if len(self._cached_blocks) > MAX_CACHED_BLOCKS:
            self._cached_blocks.popitem(last=False)
        return content


def check_no_pickles(folder: Path) -> None:
    """Raise CheckpointError where a folder holds files that run code when they are read; dstrain writes none."""
    found = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix.lower() in PICKLE_SUFFIXES
    )
    if found:
        raise CheckpointError(
            f"{folder}: {found[0]} may be a pickle, which runs code when it is read, and dstrain writes none; "
            "nothing of it was read: remove it where you know where it comes from, or choose another checkpoint"
        )
