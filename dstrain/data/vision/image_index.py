"""The images of one token store: which files they are, what they were, and where smaller copies of them lie.

STORE/images.json             a row for each image, in the order of their numbers, and for each file that was looked at in vain
CACHE/ab/abcd….png            what is kept of the image whose file has this sha256; CACHE belongs to one processor
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.data.formats.messages import BadRecord
from dstrain.data.sources.base import show_path
from dstrain.data.vision.image_io import decode_image, locate_image, read_content, read_image
from dstrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FILE = "images.json"
AGAIN = "run `dstrain prepare` again"
_THREADS, _AT_ONCE = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
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
        return show_path(Path(self.path)) if self.path else f"an image of {self.bytes} bytes within the data"

    def changed(self) -> str | None:
        """What is no more as it was, as a sentence without its mend; a look at the files' sizes and times."""
        if self.path and (state := _state(Path(self.path))) != (self.bytes, self.mtime_ns):
            if state is not None:
                return f"{self.name} is not the file that it was"
            if self.copy is None:
                return f"{self.name} is gone"
        if self.copy and (state := _state(Path(self.copy)) or (0, 0))[0] != self.copy_bytes:
            return f"the copy of {self.name}, {self.copy}, is gone or damaged"
        return None

    def load(self) -> Image:
        """The image as RGB. Raises DataError where what is kept of it has changed."""
        kept = Path(self.copy or self.path or "")
        if self.copy is None and (reason := self.changed()):
            raise DataError(f"{reason}; {AGAIN}")
        try:
            image = read_image(kept)
        except BadRecord as fault:
            raise DataError(f"{self.name} was whole once, and now: {fault.reason}; {AGAIN}") from fault
        if image.size != self.size:
            raise DataError(f"{show_path(kept)} is not the image that it was; {AGAIN}")
        return image


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """A file that records name and no example has: it is bad, or the record is. Mended, it makes another store."""

    path: str
    bytes: int | None
    """None where there was no such file."""
    ctime_ns: int | None
    """Other than the time of its content, it tells that a permission was given."""

    @classmethod
    def of(cls, path: Path) -> Unused:
        found = _stat(path)
        return cls(path=str(path), bytes=found and found.st_size, ctime_ns=found and found.st_ctime_ns)

    def changed(self) -> str | None:
        """As of a Picture."""
        name = show_path(Path(self.path))
        return None if Unused.of(Path(self.path)) == self else f"{name}, which could not be used, is another now"


def _stat(path: Path) -> os.stat_result | None:
    """None where there is no such file."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _state(path: Path) -> tuple[int, int] | None:
    """Size and time of a file; None where it is gone."""
    found = _stat(path)
    return None if found is None else (found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Shown:
    """An image of a sample, decoded when it is asked for."""

    album: Album
    index: int

    def load(self) -> Image:
        """The image as RGB. Raises DataError where it has changed."""
        return self.album.load(self.index)

    @property
    def copied(self) -> bool:
        """As `Album.copied`."""
        return self.album.copied(self.index)


def _first_changed(files: Iterable[Picture | Unused]) -> str | None:
    return next(filter(None, (file.changed() for file in files)), None)


class Album:
    """The images of a store, read-only. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Open what `AlbumWriter` wrote. Raises OSError, ValueError, KeyError or TypeError where it is not whole."""
        rows = json.loads((folder / FILE).read_text(encoding="utf-8"))
        self._pictures = [Picture(**row) for row in rows["images"]]
        self._unused = [Unused(**row) for row in rows["unused"]]
        self.digest = hashlib.sha256(" ".join(picture.sha256 for picture in self._pictures).encode()).hexdigest()
        """Equal where all the images are, in the same order."""

    def __len__(self) -> int:
        return len(self._pictures)

    def copied(self, index: int) -> bool:
        """Whether the image lies in the cache, smaller or because the data holds it itself."""
        return self._pictures[index].copy is not None

    def load(self, index: int) -> Image:
        """The image as RGB. Raises DataError where it has changed."""
        return self._pictures[index].load()

    def pick(self, indices: Iterable[int]) -> list[Shown]:
        return [Shown(self, int(index)) for index in indices]

    def changed(self) -> str | None:
        """The first image that is gone or other than it was, as a sentence without its mend.

        One whose copy is kept may be gone itself. One that could not be used counts too: it may have been mended.
        """
        files = [*self._pictures, *self._unused]
        parts = [files[start : start + _AT_ONCE] for start in range(0, len(files), _AT_ONCE)]
        with ThreadPoolExecutor(_THREADS) as pool:  # a file server answers many questions at once
            return next(filter(None, pool.map(_first_changed, parts)), None)


class AlbumWriter:
    """Reads images as records name them, each once, and keeps what is smaller."""

    def __init__(self, settle: Callable[[Image], Image | None], cache: Path) -> None:
        """`settle` makes a smaller image that says the same, or None; `cache` is a folder of its results alone."""
        self._settle, self._cache = settle, cache
        self._known: dict[str, Picture | str | Future[Picture | str]] = {}
        """The file's path from the root, or the hash of bytes -> the image, or why it cannot be used, or who is finding out."""
        self._looking = threading.Lock()
        self._numbers: dict[Picture, int] = {}
        self._unused: dict[str, Unused] = {}

    def look(self, value: Any, folder: Path) -> Picture:
        """The image that a record names, decoded, settled and hashed where nobody did so before. Thread-safe.

        `folder` is where relative paths start. Raises BadRecord.
        """
        source = locate_image(value, folder)
        # Links are followed each time anew: one that leads elsewhere later gives another image.
        key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else str(source.absolute())
        with self._looking:
            known = self._known.get(key)
            if known is None:
                self._known[key] = found = Future[Picture | str]()
        if known is None:
            known = self._find(source, key, found)
        elif isinstance(known, Future):
            known = known.result()
        if isinstance(known, str):
            raise BadRecord(known)
        return known

    def number(self, picture: Picture) -> int:
        """The picture's number in the album: they are given in the order of asking. Not thread-safe."""
        return self._numbers.setdefault(picture, len(self._numbers))

    def write(self, folder: Path) -> list[str]:
        """Write the list of images that have a number into a store's folder, a row a line; the names of the files written."""
        used = {picture.path for picture in self._numbers}
        unused = [asdict(self._unused[path]) for path in sorted(self._unused) if path not in used]
        lists = {"images": [asdict(picture) for picture in self._numbers], "unused": unused}
        parts = (f"{json.dumps(name)}: [{_rows(rows)}]" for name, rows in lists.items())
        with (folder / FILE).open("w", encoding="utf-8") as file:
            file.write("{" + ",\n".join(parts) + "}\n")
            file.flush()
            os.fsync(file.fileno())
        return [FILE]

    def _find(self, source: Path | bytes, key: str, found: Future[Picture | str]) -> Picture | str:
        """Find out for all that wait. Of a fault its words are kept: the fault itself would hold the file's content."""
        try:
            known: Picture | str = self._enter(source, key)
        except BadRecord as fault:
            known = fault.reason
        except BaseException as fault:
            found.set_exception(fault)
            raise
        self._known[key] = known
        found.set_result(known)
        return known

    def _enter(self, source: Path | bytes, key: str) -> Picture:
        path = None if isinstance(source, bytes) else Path(key)
        state = None  # of before it is read: a change in between is then seen
        if path:
            self._unused[key], state = Unused.of(path), _state(path)
        content, name = read_content(source)
        sha256 = hashlib.sha256(content).hexdigest()
        copy = self._cache / sha256[:2] / f"{sha256}.png"
        image = _read_copy(copy)
        if image is None:
            whole = decode_image(content, name)
            image, smaller = whole, self._smaller(whole, name)
            if smaller is not None or path is None:
                image = smaller or whole
                _keep(image, copy)
        kept = _state(copy)
        return Picture(
            path=str(path) if path else None,
            bytes=len(content),
            mtime_ns=state[1] if state else 0,
            sha256=sha256,
            width=image.width,
            height=image.height,
            copy=str(copy.absolute()) if kept else None,
            copy_bytes=kept[0] if kept else 0,
        )

    def _smaller(self, image: Image, name: str) -> Image | None:
        try:
            return self._settle(image)
        except (MemoryError, DataError):
            raise
        except Exception as fault:
            cause = f"{type(fault).__name__}: {fault}"
            problem = f"the model's image processor cannot use {name}, {image.width}x{image.height} pixels ({cause})"
            raise BadRecord(f"{problem}; change the image, or remove the record") from fault


def _rows(rows: Iterable[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def _read_copy(copy: Path) -> Image | None:
    """The copy that an earlier preparation kept; None where there is none, or a damaged one."""
    try:
        return read_image(copy) if copy.is_file() else None
    except BadRecord:
        return None


def _keep(image: Image, copy: Path) -> None:
    """Write the PNG whole or not at all, whoever else writes it too."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f"{copy.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(file.getbuffer())
        os.replace(partial, copy)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
