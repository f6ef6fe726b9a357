"""The cache: entries that are built once, and opened only where their files are those that were written."""

# DSTRAIN_CACHE/KIND/KEY/MANIFEST.json   the key, and the size and SHA-256 of each file; written last
# DSTRAIN_CACHE/KIND/KEY/…               the files
# DSTRAIN_CACHE/KIND/KEY.lock            locked while a process builds the entry; it holds the process, host and time
# DSTRAIN_CACHE/digests/ab/abcd….json    a result of reading one file, with the state the file was in
#
# KIND is tokens, tokenizers, documents, references, scores, clusters or image_statistics. The folder `images` holds
# single files instead, named after what they hold (data/vision/images.py).

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from dstrain.errors import DataError, one_line
from dstrain.files import (
    atomic_folder,
    atomic_write,
    check_path_encoding,
    parse_json,
    partial_path,
    read_limited,
    remove_path,
    remove_stale_partials,
    sync_folder,
)
from dstrain.process_setup import log_stderr
from dstrain.units import format_duration

MANIFEST = "MANIFEST.json"
RACY_WINDOW_NS = 2_000_000_000
"""A file that changed shortly before it was read may change again within one tick of its file
system's clock, with the same mtime; results of such files are not cached."""
MAX_CACHED_JSON_BYTES = 2 << 30
"""Largest JSON file that is read; a list of a million images has a quarter."""
_POLL_SECONDS, LOG_SECONDS = 0.05, 30.0
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EACCES)
"""Errors of a file system without locks, and of a lock that another user made."""

T = TypeVar("T")


def cache_root() -> Path:
    """Return DSTRAIN_CACHE, else dstrain/ in XDG_CACHE_HOME or ~/.cache.

    Raises UsageError if the path is not valid UTF-8, or starts with ~ and the home folder is unknown.
    """
    default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/dstrain"
    path = os.environ.get("DSTRAIN_CACHE") or default
    check_path_encoding(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as fault:
        problem = f"the cache folder {path} begins with ~, and no home folder is known"
        raise DataError(f"{problem}; set DSTRAIN_CACHE to an absolute path, or set HOME") from fault


def hash_key(key: Mapping[str, Any]) -> str:
    """Return the name of a cache entry: a hash of the key as canonical JSON. Raises ValueError for NaN."""
    # Canonical: the same key must give the same name in every process and version.
    # Sorted as it is read from a manifest: JSON has only texts as names.
    values = json.loads(json.dumps(key))  # noqa: TID251  of this process
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def entry_path(kind: str, key: Mapping[str, Any]) -> Path:
    """Return the folder of an entry, whether or not it exists."""
    return cache_root() / kind / hash_key(key)


def get_or_build(
    kind: str,
    key: Mapping[str, Any],
    build: Callable[[Path], object],
    load: Callable[[Path], T],
    *,
    find_change: Callable[[T], str | None] = lambda value: None,
) -> T:
    """Return `load(folder)` of the entry under this key; where it is missing, or not what was written, build it first.

    `build(folder)` writes the entry's files into an empty folder. `find_change` returns why a value that was loaded is
    out of date, as a clause, such as a file outside the cache that has changed; None if it is not. One process builds;
    the others wait for its lock, and print who holds it every LOG_SECONDS. Never a collective: a build may
    take longer than the process group's timeout. Raises DataError where the cache cannot be read or written.
    """
    folder = entry_path(kind, key)
    load_current = partial(_load, folder, key, load, find_change)
    if (loaded := load_current()) is not None:
        return loaded[0]
    with _explain_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _build_lock(folder) as was_interrupted:
            if was_interrupted:  # not at each build: the folder may hold a hundred thousand entries
                remove_stale_partials(folder)
            # Again under the lock: another process may have built it meanwhile.
            if (loaded := load_current(is_quiet=True)) is not None:
                return loaded[0]
            _build(folder, key, build, lambda: load_current(is_quiet=True) is not None)
            _mark_checked(folder)
            return load(folder)


def load_entry(kind: str, key: Mapping[str, Any], load: Callable[[Path], T]) -> T | None:
    """Return `load(folder)` of the entry under this key; None where it is missing, or not what was written."""
    found = _load(entry_path(kind, key), key, load, lambda value: None)
    return None if found is None else found[0]


def write_entry(kind: str, key: Mapping[str, Any], build: Callable[[Path], object]) -> None:
    """Write the entry that `load_entry` did not find; without a lock. Raises DataError."""
    folder = entry_path(kind, key)
    with _explain_errors(folder):
        remove_stale_partials(folder)
        _build(folder, key, build, lambda: find_mismatch(folder, key) is None)


@contextlib.contextmanager
def check_once(checked: Iterable[str] = ()) -> Iterator[set[str]]:
    """Check each entry once inside, and the entries in the folders `checked` not at all.

    Processes of one host need not all hash the same files. Yields the folders of the entries that are unchanged.
    """
    token = _checked_folders.set(set(checked))
    try:
        yield cast("set[str]", _checked_folders.get())
    finally:
        _checked_folders.reset(token)


_checked_folders: ContextVar[set[str] | None] = ContextVar("checked", default=None)


def _is_checked(folder: Path) -> bool:
    return str(folder) in (_checked_folders.get() or ())


def _mark_checked(folder: Path) -> None:
    if (checked := _checked_folders.get()) is not None:
        checked.add(str(folder))


def read_cached_json(path: Path) -> Any:
    """Return the value of a JSON file in the cache. Raises OSError or ValueError."""
    return parse_json(read_limited(path, MAX_CACHED_JSON_BYTES), MAX_CACHED_JSON_BYTES)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return {"key", "files": name -> {"size", "sha256"}} of an entry. Raises OSError or ValueError."""
    manifest = read_cached_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST} does not list files")
    return manifest


def find_mismatch(folder: Path, key: Mapping[str, Any]) -> str | None:
    """Return how an entry differs from what was written, as a clause; None for no difference.

    Files are compared by their hashes, which `file_digest` caches. Raises PermissionError.
    """
    try:
        manifest = read_manifest(folder)
        if hash_key(manifest["key"]) != hash_key(key):
            return "it is the entry of another key"
        names = {name for name in os.listdir(folder) if not name.startswith(".nfs")}  # .nfs: removed, still open
        expected = {MANIFEST, *manifest["files"]}
        if names != expected:
            name = min(names ^ expected)
            return f"{name} {'was added' if name in names else 'is missing'}"
        for name, written in manifest["files"].items():
            found = os.lstat(folder / name)
            if (
                not stat.S_ISREG(found.st_mode)
                or found.st_size != written["size"]
                or file_digest(folder / name) != written["sha256"]
            ):
                return f"{name} is not what was written"
    except PermissionError:
        raise
    except FileNotFoundError as fault:
        return f"{Path(fault.filename or MANIFEST).name} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    return None


def _load(
    folder: Path,
    key: Mapping[str, Any],
    load: Callable[[Path], T],
    find_change: Callable[[T], str | None],
    is_quiet: bool = False,
) -> tuple[T] | None:
    """Return the value of an entry that is as it was written and up to date, else None."""
    if not os.path.lexists(folder):
        return None
    try:
        reason = None if _is_checked(folder) else find_mismatch(folder, key)
        if reason is None:
            value = load(folder)
            if _is_checked(folder) or (reason := find_change(value)) is None:
                _mark_checked(folder)
                return (value,)
    except PermissionError as fault:
        problem = f"{fault.filename or folder} in the cache cannot be read ({fault.strerror})"
        fix = "let its owner make it readable, or set DSTRAIN_CACHE to another folder"
        raise DataError(f"{problem}; {fix}") from fault
    except (OSError, ValueError, KeyError, TypeError) as fault:
        reason = f"it cannot be loaded ({one_line(str(fault))})"
    if not is_quiet:
        log_stderr(f"{folder} in the cache is built again: {reason}")
    return None


def _build(
    folder: Path, key: Mapping[str, Any], build: Callable[[Path], object], is_current: Callable[[], bool]
) -> None:
    """Build in a folder of this process's own, which the first builder to finish renames to the entry's name.

    A lock alone is not enough: it may be local to a host (Lustre's localflock, NFS's local_lock).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder, lambda own, final: _publish(own, final, is_current)) as own:
        own.mkdir()
        build(own)
        _write_manifest(own, key)
    sync_folder(folder.parent)


def _write_manifest(folder: Path, key: Mapping[str, Any]) -> None:
    """Write the manifest of the files in a folder, and flush all of them: a name must not outlive its content."""
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {
                "size": os.fstat(file.fileno()).st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
            os.fsync(file.fileno())
    atomic_write(folder / MANIFEST, json.dumps({"key": key, "files": files}), sync=True)


def _publish(own: Path, folder: Path, is_current: Callable[[], bool]) -> None:
    """Give the entry its name, or leave a current one that another process has built; remove a damaged one."""
    while True:
        try:
            # Atomic, and never replaces a folder with content.
            os.rename(own, folder)
            return
        except OSError as fault:
            if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if is_current():
            return
        # Renamed before it is deleted, so that no reader opens half of it.
        aside = partial_path(folder)
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            os.rename(folder, aside)
        remove_path(aside)


@contextlib.contextmanager
def _build_lock(folder: Path) -> Iterator[bool]:
    """Hold the entry's lock inside; without a lock where the file system has none (see `_build`).

    Yields True where an earlier builder may have been killed: it left the lock's file, or there are no locks.
    """
    path = f"{folder}.lock"
    last_log = time.monotonic()
    while True:
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between the two calls.
            if _is_same_file(path, descriptor):
                break
            os.close(descriptor)
            continue
        except BlockingIOError:
            if time.monotonic() - last_log >= LOG_SECONDS:
                log_stderr(f"waiting for the cache entry {folder}, {_describe_builder(descriptor)}")
                last_log = time.monotonic()
            os.close(descriptor)
            time.sleep(_POLL_SECONDS)
        except OSError as fault:
            if descriptor >= 0:
                os.close(descriptor)
            if fault.errno not in _NO_LOCK_ERRNOS:
                raise
            problem = f"{path} cannot be locked ({fault.strerror})"
            log_stderr(f"{problem}: processes that start at the same time each build {folder.name}")
            yield True
            return
    try:
        was_interrupted = os.fstat(descriptor).st_size > 0
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps([os.getpid(), socket.gethostname(), time.time()]).encode(), 0)
        yield was_interrupted
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):  # the kernel releases the lock with the descriptor
            os.close(descriptor)


def _is_same_file(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _describe_builder(descriptor: int) -> str:
    try:
        process, host, began = parse_json(os.pread(descriptor, 4096, 0))
        since = format_duration(time.time() - float(began))
        return f"which process {int(process)} on {one_line(str(host))} has been building for {since}"
    except (OSError, ValueError, TypeError):
        return "which another process is building"


@contextlib.contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    """Raise DataError for an OSError while an entry is built."""
    try:
        yield
    except OSError as fault:
        if isinstance(fault, FileNotFoundError) and str(fault.filename or folder).startswith(str(folder)):
            raise DataError(f"{folder} was removed from the cache while it was written; start again") from fault
        fix = "if that folder is full or read-only, set DSTRAIN_CACHE to another"
        raise DataError(f"{folder} cannot be written into the cache: {fault}; {fix}") from fault


def file_state(path: Path) -> list[int]:
    """Return size, inode and times of a file, equal if it was not written or replaced.

    Raises OSError.
    """
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def load_file_result(path: Path, result_name: Any) -> Any:
    """Return what `save_file_result` cached for a file; None if nothing, or if the file has changed."""
    try:
        key, target = _locate_result(path, result_name)
        entry = read_cached_json(target)
        is_written = entry.pop("hash") == hash_key(entry) and hash_key(entry["key"]) == hash_key(key)
        return entry["value"] if is_written and entry["state"] == file_state(path) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError):
        return None


def save_file_result(path: Path, result_name: Any, value: Any, read_start_ns: int, state: list[int]) -> None:
    """Cache a result of reading a file; `result_name` and `value` are JSON.

    `read_start_ns`: when reading began; `state`: the `file_state` then. Nothing is cached if the file
    has changed since, or changed so shortly before that another change might go unnoticed (Git calls
    such an entry racily clean: gitformat-index, "racy"), or if the cache is not writable.
    """
    with contextlib.suppress(OSError, DataError):
        # ctime, because mtime can be set back by programs such as rsync and tar.
        if state == file_state(path) and state[3] + RACY_WINDOW_NS <= read_start_ns:
            key, target = _locate_result(path, result_name)
            entry = {"key": key, "state": state, "value": value}
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(target, json.dumps(entry | {"hash": hash_key(entry)}))


def _locate_result(path: Path, result_name: Any) -> tuple[dict[str, Any], Path]:
    """Return the key of a file's result, and where it is cached."""
    # The real path, so that a link and its target share a result.
    key = {"path": os.path.realpath(path), "what": result_name}
    name = hash_key(key)
    # In folders of two digits, so that none holds a file for each image of a data set.
    return key, cache_root() / "digests" / name[:2] / f"{name}.json"


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, cached across processes. Raises OSError."""
    known = load_file_result(path, "sha256")
    if known is not None:
        return str(known)
    read_start, state = time.time_ns(), file_state(path)
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    save_file_result(path, "sha256", digest, read_start, state)
    return digest
