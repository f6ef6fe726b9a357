"""Every point at which a process changes the disk, found from outside and without a change to what is tested.

Python announces opening, renaming, making and removing to audit hooks; `os.fsync` and the writing of hashed files are
wrapped. A point lies just before the change; a torn write lies in the middle of one, and only the first TORN of each
file count: its header or beginning, and its first values.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from dstrain.training.state.manifest import HashedFileWriter

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
TORN = 2


class Points:
    """Counts the points below a folder, and acts at one of them."""

    def __init__(self, folder: Path, at: int | None, act: Callable[[], None]) -> None:
        """`at`: number of the point, from 0; None: only count."""
        self.seen: list[str] = []
        """`open step-00000004.partial/MANIFEST.json`, in order."""
        self._folder, self._at, self._act = folder.resolve(), at, act
        self._on, self._torn, self._made = False, Counter[str](), set[Any]()
        sys.addaudithook(self._hear)  # stays for the life of the process

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, points count."""
        sync, write = os.fsync, HashedFileWriter.write

        def fsync(descriptor: int) -> None:
            self._reach("fsync", f"/proc/self/fd/{descriptor}")
            sync(descriptor)

        def torn(file: HashedFileWriter, content: bytes | memoryview) -> None:
            def half() -> None:
                view = memoryview(content).cast("B")
                file._file.write(view[: len(view) // 2])
                file._file.flush()

            self._torn[file._file.name] += 1
            if self._torn[file._file.name] <= TORN:
                self._reach(f"half of write {self._torn[file._file.name]} to", file._file.name, half)
            write(file, content)

        with mock.patch.object(os, "fsync", fsync), mock.patch.object(HashedFileWriter, "write", torn):
            self._on = True
            try:
                yield
            finally:
                self._on = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        match event, arguments:
            case "open", (path, _, flags) if not isinstance(path, int) and flags & WRITES:
                self._reach("open", path)
            case "os.mkdir", (path, _, folder) if path not in self._made:  # whichever process comes first
                self._made.add(path)
                self._reach("mkdir", path, folder=folder)
            case "os.rename", (path, _, folder, _):
                self._reach("rename", path, folder=folder)
            case (("os.remove" | "os.rmdir"), (path, folder)):
                self._reach("unlink" if event == "os.remove" else "rmdir", path, folder=folder)
            case "os.symlink", (_, path, folder):
                self._reach("symlink", path, folder=folder)

    def _reach(
        self, what: str, path: Any, before: Callable[[], None] = lambda: None, folder: int | None = None
    ) -> None:
        place = os.fsdecode(path)
        if folder is not None and folder >= 0:
            place = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), place)
        elif place.startswith("/proc/self/fd/"):
            place = os.readlink(place)
        if not Path(place).is_relative_to(self._folder):
            return
        self.seen.append(f"{what} {Path(place).relative_to(self._folder).as_posix()}")
        if len(self.seen) - 1 == self._at:
            self._on = False
            before()
            self._act()
