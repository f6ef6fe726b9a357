"""What is kept between starts: the folder it lies in, names that no other process writes to, and hashes of files.

DSTRAIN_CACHE/digests/ab/abcd….json    what was found in one file, and the state of the file it was found in
PLACE.HOST-PID-TOKEN.partial           PLACE while a process builds it; the first to finish renames its own
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.errors import DataError

RACY_WINDOW_NS = 2_000_000_000
"""A file that changed less than this before it was read may change again within one tick of its file system's clock."""
STALE_PARTIAL_SECONDS = 24 * 3600.0
"""A partial folder of another host in which nothing was written for so long is taken for a dead process's."""
_PARTIAL_OWNER = re.compile(r"\.([0-9a-f]{12})-(\d+)-[0-9a-f]{8}\.partial$")


def cache_root() -> Path:
    """DSTRAIN_CACHE, else dstrain/ in XDG_CACHE_HOME or ~/.cache. Raises DataError where no home folder is known."""
    own = os.environ.get("DSTRAIN_CACHE")
    wanted = own or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/dstrain"
    try:
        return Path(wanted).expanduser()
    except RuntimeError as fault:
        problem = f"the cache's folder {wanted} begins with ~, and no home folder is known"
        raise DataError(f"{problem}; set DSTRAIN_CACHE to a folder's whole path, or set HOME") from fault


def hash_key(key: Mapping[str, Any]) -> str:
    """The name of the subfolder: a hash of the key as canonical JSON."""
    text = json.dumps(key, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def host_id() -> str:
    """This host and pid namespace, where a pid means something."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:12]


def partial_path(path: Path) -> Path:
    """A path beside `place`, on the same file system, that nobody else writes to, on this host or another."""
    return path.with_name(f"{path.name}.{host_id()}-{os.getpid()}-{secrets.token_hex(4)}.partial")


def atomic_write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else writes it too. Raises OSError."""
    partial = partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_stale_partials(path: Path) -> None:
    """Remove the partial folders of `place` whose processes are gone; another host's where nothing was written for a day."""
    for partial in path.parent.glob(f"{path.name}*.partial"):
        owner = _PARTIAL_OWNER.search(partial.name)
        if owner is not None and owner[1] == host_id():
            gone = not _is_alive(int(owner[2]))
        else:
            gone = time.time() - _last_modified(partial) > STALE_PARTIAL_SECONDS
        if gone:
            shutil.rmtree(partial, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _last_modified(folder: Path) -> float:
    """The newest time of the folder and what lies in it; now, where that cannot be told."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


def file_state(path: Path) -> list[int]:
    """Size, number and times of a file: equal where it was neither written nor exchanged. Raises OSError."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def load_file_result(path: Path, result_name: Any) -> Any:
    """What `remember` kept of a file under the name `what`; None where there is nothing, or the file has changed."""
    try:
        entry = json.loads(_entry_path(path, result_name).read_text(encoding="utf-8"))
        return entry["value"] if entry["state"] == file_state(path) else None
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


def save_file_result(path: Path, result_name: Any, value: Any, read_start_ns: int, state: list[int]) -> None:
    """Keep what was found in a file that was read from `began_ns` on, when it had this state; `what` and value as JSON has them.

    Nothing is kept of a file that changed since, or so shortly before that a second change might not show (the trap
    that Git calls racily clean: gitformat-index, "racy"), nor where the cache cannot be written.
    """
    with contextlib.suppress(OSError, DataError):
        if state == file_state(path) and state[3] + RACY_WINDOW_NS <= read_start_ns:
            entry = {"path": str(path.absolute()), "what": result_name, "state": state, "value": value}
            atomic_write_text(_entry_path(path, result_name), json.dumps(entry))


def _entry_path(path: Path, result_name: Any) -> Path:
    name = hash_key({"path": os.path.realpath(path), "what": result_name})
    return cache_root() / "digests" / name[:2] / f"{name}.json"


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, read where they are not known from an earlier start. Raises OSError."""
    known = load_file_result(path, "sha256")
    if known is not None:
        return str(known)
    began, state = time.time_ns(), file_state(path)
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    save_file_result(path, "sha256", found, began, state)
    return found
