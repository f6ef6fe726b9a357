"""The cache folder: its path, the names in it, and results that are cached per file.

DSTRAIN_CACHE/digests/ab/abcd….json    a result of reading one file, with the state the file was in
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.errors import DataError
from dstrain.files import atomic_write

RACY_WINDOW_NS = 2_000_000_000
"""A file that changed less than this before it was read may change again within one tick of its file system's clock."""


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
            target = _entry_path(path, result_name)
            target.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(target, json.dumps(entry))


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
