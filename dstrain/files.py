"""Atomic writes of files and folders; regular files and their state; JSON and arrays within limits; paths in messages.

PATH.HOST-PID-TOKEN.partial     PATH while one process writes it
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, Self

from dstrain.errors import RecipeError, UsageError, one_line

if TYPE_CHECKING:
    import numpy as np

Content = bytes | str | Callable[[IO[bytes]], object]
"""Bytes, a text (written as UTF-8), or a function that writes into the open file."""
NOT_REGULAR = "is not a regular file"
MAX_JSON_BYTES = 64 << 20
"""Largest config that is read; one has some thousand bytes."""
TRANSIENT_ERRNOS = (errno.ESTALE, errno.EIO, errno.ENOENT, errno.EEXIST, errno.EAGAIN, errno.ETIMEDOUT)
"""Errors of disks and network file systems that may be gone some seconds later.

EEXIST: of making a folder that exists, where a network file system says for a moment that it does not.
"""
RETRY_SECONDS = 5.0
"""Pause before the second try of what such an error has ended."""
STALE_PARTIAL_SECONDS = 24 * 3600.0
"""A partial file of another host counts as a dead process's after this many seconds without a write."""
_OWNER = r"\.([0-9a-f]{12})-(\d+)-[0-9a-f]{8}"


def check_path_encoding(path: str) -> None:
    """Raise UsageError for a path that is not valid UTF-8, or that is, but Python's file system encoding is not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        content, encoding = os.fsencode(path), sys.getfilesystemencoding()
        with contextlib.suppress(UnicodeDecodeError):
            if encoding.lower() != "utf-8" and content.decode():
                problem = f"is UTF-8, but Python reads paths as {encoding} here"
                raise UsageError(f"{path!a}: {problem}; set PYTHONUTF8=1, or LC_ALL=C.UTF-8") from None
        shown = content.decode(errors="backslashreplace")
        problem = "is not valid UTF-8, which recipes, logs and trackers need"
        raise UsageError(f"{shown}: {problem}; rename the file or folder, or choose another") from None


@cache
def get_host_id() -> str:
    """Return a string that is equal where process ids mean the same: same host name, boot and pid namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return " ".join(parts)


@cache
def _hash_host_id() -> str:
    """Return the host's id in a form that is short and valid in a file name."""
    return hashlib.sha256(get_host_id().encode()).hexdigest()[:12]


def partial_path(path: Path) -> Path:
    """Return a path next to `path`, on the same file system, that no other process on any host writes to."""
    return path.with_name(f"{path.name}.{_hash_host_id()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def atomic_write(path: Path, content: Content, sync: bool = False) -> None:
    """Write a file so that readers find the old content or the new, never a part. Raises OSError.

    The folder must exist. With `sync`, the content and the new name are on the disk on return.
    """
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        # Atomic: a reader that has the old file open keeps it.
        os.replace(partial, path)
    # Also for KeyboardInterrupt, which is no Exception.
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path, rename: Callable[[Path, Path], object] = os.rename) -> Iterator[Path]:
    """Yield a name next to `path` for a new folder; rename that folder to `path` at the end.

    The new folder is removed where the body or `rename(partial, path)` raises, and where `rename` leaves it behind.
    os.rename raises OSError with ENOTEMPTY or EEXIST where `path` exists and is not an empty folder.
    """
    partial = partial_path(path)
    try:
        yield partial
        rename(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_stale_partials(path: Path) -> None:
    """Remove the partial files and folders of `path` that dead processes left.

    Those of another host go after a day without a write.
    """
    name = re.compile(re.escape(path.name) + _OWNER + r"\.partial")
    with contextlib.suppress(OSError):  # a folder that does not exist, or that only its owner may list
        for entry in os.listdir(path.parent):
            if (owner := name.fullmatch(entry)) and _is_stale(path.with_name(entry), owner[1], owner[2]):
                remove_path(path.with_name(entry))


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, after a rename, where the file system can (some network ones cannot)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _is_stale(partial: Path, host: str, pid: str) -> bool:
    if host == _hash_host_id():
        import psutil

        return not psutil.pid_exists(int(pid))  # a pid means something only on its own host
    return time.time() - _last_modified(partial) > STALE_PARTIAL_SECONDS


def _last_modified(path: Path) -> float:
    """Return the newest time of a file, or of a folder and its entries; now, where it cannot be read."""
    try:
        entries = path.iterdir() if path.is_dir() else ()
        return max(entry.stat().st_mtime for entry in (path, *entries))
    except OSError:
        return time.time()


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its content, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def display_path(path: Path) -> str:
    """Return the path for a message: relative if it is inside the working folder, else as given.

    Paths that cannot be read are displayed too, such as a loop of links or one with a null byte.
    """
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath(os.getcwd())))
    except (OSError, ValueError):
        return str(path)


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Never opens a device and never waits for a writer, as opening a FIFO would. Raises OSError:
    IsADirectoryError for a folder, with the text NOT_REGULAR for other kinds.
    """
    _check_regular_file(os.stat(path).st_mode)
    # O_NONBLOCK: a FIFO that takes the place of the file would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        _check_regular_file(os.fstat(descriptor).st_mode)  # it may have been replaced since the stat
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def make_folder(folder: Path) -> None:
    """Create a folder that a run writes into, and its parents. Raises UsageError for a link or a file in its place."""
    try:
        folder.mkdir(parents=True)
    except OSError:
        fault = find_entry_fault(folder, is_folder=True)
        if fault:
            raise UsageError(f"{folder}: {fault}") from None
        # It exists, whichever error the system gives first: EEXIST, EROFS or EACCES.
        if not folder.is_dir():
            raise


def open_for_writing(path: Path, append: bool = False) -> FileIO:
    """Open a file that a run writes, unbuffered, and create it and its folder.

    No link is followed, and no FIFO or device is opened or waited for: the run folder may come from somebody else.
    Raises UsageError for these, OSError for others.
    """
    make_folder(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | (os.O_APPEND if append else 0), 0o666)
    except OSError as error:
        # ELOOP: a link. ENXIO: a FIFO that nobody reads, or a socket.
        fault = find_entry_fault(path) if error.errno in (errno.ELOOP, errno.ENXIO) else ""
        if not fault:
            raise
        raise UsageError(f"{path}: {fault}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path}: {find_entry_fault(path)}")
    if not append:
        os.ftruncate(descriptor, 0)  # not by O_TRUNC, before the kind of the file is known
    return FileIO(descriptor, "ab" if append else "wb")


def find_entry_fault(path: Path, is_folder: bool = False) -> str:
    """Return why a run does not write to an entry of its folder, and the fix; empty for one that it writes to.

    `is_folder`: it is to be a folder.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    fix = "remove it, or choose another run folder"
    if stat.S_ISLNK(mode):
        return f"is a link to {one_line(os.readlink(path))}, and a run follows no link inside its folder; {fix}"
    if is_folder:
        return "" if stat.S_ISDIR(mode) else f"is not a folder; {fix}"
    # A folder in the place of a file is told by the system, where the file is opened.
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else f"{NOT_REGULAR}; {fix}"


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises OSError, also for a file of more than `max_bytes`."""
    try:
        with open_regular_file(path) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                limit = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
                raise OSError(errno.EFBIG, f"is larger than {limit}", str(path))
            return file.read()
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a call on a descriptor does not know the path
            error.filename = str(path)
        raise


MAX_JSON_DEPTH = 100
"""Levels of a JSON text; a config has five."""


def parse_json(content: bytes | bytearray | str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON text, UTF-8, that may come from elsewhere. Raises ValueError, also above the limits.

    json.loads raises RecursionError for a deep text, which is no ValueError, and so do most uses of a deep value.
    """
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    text = content if isinstance(content, str) else content.decode()
    try:
        value = json.loads(text)  # noqa: TID251
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if is_deep_json(value, text):
        raise ValueError(_TOO_DEEP)
    return value


def is_deep_json(value: Any, text: str) -> bool:
    """Return True if the value of a JSON text has more levels than MAX_JSON_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:  # most texts: no need to look at their values
        return False
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_JSON_DEPTH):
        below: list[Any] = []
        for holder in level:
            below += holder.values() if isinstance(holder, dict) else holder
        level = [item for item in below if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


_TOO_DEEP = f"it has more than {MAX_JSON_DEPTH} levels"


def read_npy_header(file: IO[bytes], size: int) -> tuple[np.dtype, tuple[int, ...]]:
    """Read the header of a .npy file of `size` bytes, up to the values; return their dtype and shape.

    The header is compared with the file before memory is asked for. Raises ValueError if it cannot be read or does not
    fit the size.
    """
    import numpy as np  # not at the top: --help answers at once

    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran_order, dtype = read_header(file)
        length = math.prod(shape) * dtype.itemsize
    # numpy evaluates the header as Python.
    except (SyntaxError, tokenize.TokenError, MemoryError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    if dtype.hasobject or is_fortran_order or min(shape, default=0) < 0:
        raise ValueError("its header names values that dstrain does not write")
    if length != size - file.tell():
        raise ValueError(f"its header names {length} bytes of values, and it has {size - file.tell()}")
    return dtype, shape


def load_npy(path: Path, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
    """Return the array of a .npy file. Raises OSError, or ValueError for a damaged file."""
    import numpy as np

    with path.open("rb") as file:
        read_npy_header(file, os.fstat(file.fileno()).st_size)
    return np.load(path, mmap_mode=mmap_mode, allow_pickle=False)


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, none if it does not exist. Raises OSError if it cannot be read.

    Path.glob returns no names for a folder that cannot be read.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _check_regular_file(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(NOT_REGULAR)


def not_file_reason(path: Path) -> str:
    """Return why a path that exists is not a readable file.

    Empty if it does not exist, or is a file or a folder.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as fault:
        if fault.errno == errno.ELOOP:
            return "is a link that points to itself"
        return f"is a link to {os.readlink(path)}, which does not exist" if os.path.islink(path) else ""
    except ValueError:  # a null byte in the path
        return ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else NOT_REGULAR


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedFile:
    """A file or folder, as it was when records were read, to notice later that it has changed."""

    path: str
    bytes: int | None
    """None if there was no such file."""
    ctime_ns: int | None
    """Unlike mtime, it also changes when a change of permissions makes the file readable."""

    @classmethod
    def from_path(cls, path: Path) -> Self:
        """Return the entry for the file's present state."""
        status = stat_or_none(path)
        return cls(path=str(path), bytes=status and status.st_size, ctime_ns=status and status.st_ctime_ns)

    def find_change(self) -> str | None:
        """Return that the file has changed, as a clause without the fix; None if it has not."""
        path = Path(self.path)
        return None if type(self).from_path(path) == self else f"{display_path(path)} has changed"


def list_entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; none where it does not exist or cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def describe_unread(names: Iterable[str]) -> str:
    """Return a clause on the files of a folder that are not read: `2 files not read: .bcif 1, .cif.bz2 1`; or nothing."""
    counts = Counter[str]()
    for name in names:
        suffixes = [suffix.lower() for suffix in Path(name).suffixes]
        counts["".join(suffixes[-2:] if suffixes[-1:] and suffixes[-1] in _PACKED else suffixes[-1:])] += 1
    total = sum(counts.values())
    kinds = ", ".join(f"{suffix or 'without a suffix'} {count}" for suffix, count in sorted(counts.items()))
    return f"{total} file{'s' * (total != 1)} not read: {kinds}" if total else ""


def match_files(pattern: Path) -> list[Path]:
    """Return what a pattern such as `data/train-*.parquet` fits in its folder, by name; [] for a name without `*`.

    `*` stands for any characters in the name. Folders and hidden files are left out, broken links are not. Raises
    UsageError for a name that is not valid UTF-8.
    """
    if "*" not in pattern.name:
        return []
    expression = re.compile(".*".join(map(re.escape, pattern.name.split("*"))), re.DOTALL)
    fit = [path for path in list_entries(pattern.parent) if expression.fullmatch(path.name) and path.name[0] != "."]
    files = sorted(path for path in fit if not path.is_dir())
    for path in files:
        check_path_encoding(str(path))
    return files


def find_path(text: str, recipe_dir: Path) -> Path | None:
    """Return the existing path that `text` means, absolute; None if there is none. Raises UsageError."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise RecipeError(f"{text}: begins with ~, but no home folder is known; write it out, or set HOME") from None
    for place in (path, recipe_dir / path):
        if path_exists(place):
            check_path_encoding(str(place.resolve()))
            return place.resolve()
    return None


def find_pattern(text: str, recipe_dir: Path) -> Path | None:
    """Return the pattern of data files that `text` means, absolute; None if no file fits."""
    path = Path(text).expanduser()
    for place in (path, recipe_dir / path):
        if match_files(place):
            folder = place.parent.resolve()
            check_path_encoding(str(folder))
            return folder / place.name
    return None


def path_exists(path: Path) -> bool:
    """Return True if the path exists; False for one that is too long, or in a folder without permission."""
    try:
        return path.exists()
    except OSError:
        return False


def stat_or_none(path: Path) -> os.stat_result | None:
    """Return the status of a file; None if there is none, or if its path has a null byte."""
    try:
        return path.stat()
    except (OSError, ValueError):
        return None
