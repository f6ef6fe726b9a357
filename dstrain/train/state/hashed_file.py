"""Files with a hash for each block: taken while they are written, compared with whatever is read."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dstrain.errors import CheckpointError

BLOCK = 4 << 20
"""Bytes of a block."""
CACHED = 4
"""Blocks of a file that a reader keeps."""
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")

Entry = dict[str, Any]
"""{"size": bytes, "sha256": [one hash per block]}"""


class HashedFile:
    """A file being written; `entry` is there once it is closed and on the disk."""

    entry: Entry

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._hashes: list[str] = []
        self._block = hashlib.sha256()
        self._in_block = 0

    def write(self, content: bytes | memoryview) -> None:
        """Write and hash."""
        view = memoryview(content).cast("B")
        self._file.write(view)
        while len(view):
            part = view[: BLOCK - self._in_block]
            self._block.update(part)
            self._in_block += len(part)
            view = view[len(part) :]
            if self._in_block == BLOCK:
                self._end_block()

    def _end_block(self) -> None:
        self._hashes.append(self._block.hexdigest())
        self._block, self._in_block = hashlib.sha256(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                size = self._file.tell()
                if self._in_block or not size:
                    self._end_block()
                self.entry = {"size": size, "sha256": self._hashes}
        finally:
            self._file.close()


def write_hashed(path: Path, content: bytes) -> Entry:
    """Write a whole file; returns its size and hashes."""
    with HashedFile(path) as file:
        file.write(content)
    return file.entry


class BlockFile:
    """A file whose blocks are compared with their hashes as they are read. Raises CheckpointError where one differs."""

    def __init__(self, path: Path, entry: Entry) -> None:
        self.path, self.size, self._hashes = path, int(entry["size"]), entry["sha256"]
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def read(self, begin: int, length: int) -> bytearray:
        """Bytes from `begin` on."""
        if begin < 0 or begin + length > self.size:
            raise CheckpointError(f"{self.path}: names values beyond its end; choose another checkpoint")
        found = bytearray()
        while len(found) < length:
            index, skip = divmod(begin + len(found), BLOCK)
            found += memoryview(self.block(index))[skip : skip + length - len(found)]
        return found

    def block(self, index: int) -> bytes:
        """One block, as it was written."""
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        try:
            with self.path.open("rb") as file:
                file.seek(index * BLOCK)
                content = file.read(BLOCK)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read ({error.strerror}); choose another checkpoint"
            ) from error
        if hashlib.sha256(content).hexdigest() != self._hashes[index]:
            raise CheckpointError(
                f"{self.path}: is not what was written, the sha256 of bytes {index * BLOCK} to "
                f"{index * BLOCK + len(content)} differs; choose another checkpoint"
            )
        self._kept[index] = content
        if len(self._kept) > CACHED:
            self._kept.popitem(last=False)
        return content


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where a folder holds files that run code when they are read; dstrain writes none."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix.lower() in PICKLES)
    if found:
        raise CheckpointError(
            f"{folder}: {found[0]} may be a pickle, which runs code when it is read, and dstrain writes none; "
            "nothing of it was read: remove it where you know where it comes from, or choose another checkpoint"
        )
