"""Temporary folders of evaluate, generate and prepare, and removal of stale ones."""

# While a command runs, `owner.json` in its folder names its process. The folder of a failed command
# is kept for its logs, without that file. A folder whose owner has ended was left by a killed
# command; the next command of the same user on the same host removes it.

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from itertools import islice
from pathlib import Path

from dstrain.errors import UsageError
from dstrain.files import get_host_id
from dstrain.launch.processes import is_process_alive, start_time

OWNER_FILE = "owner.json"
_SCRATCH_NAME = re.compile(r"dstrain-[0-9a-f]{16}")
_MAX_SCANNED, _MAX_REMOVED = 10_000, 20
"""Limits per command: TMPDIR is shared with other users, and may be slow."""


def make_scratch_path() -> Path:
    """Return a new path in TMPDIR."""
    return Path(tempfile.gettempdir()) / f"dstrain-{secrets.token_hex(8)}"


def make_scratch(scratch_dir: Path) -> None:
    """Create the folder, for this user only, and remove those of killed commands.

    Raises UsageError.
    """
    try:
        scratch_dir.mkdir(mode=0o700)
        owner = {"machine": get_host_id(), "pid": os.getpid(), "started": start_time(os.getpid())}
        (scratch_dir / OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{scratch_dir} cannot be created ({error.strerror}); set TMPDIR to another folder") from None
    with contextlib.suppress(OSError):
        remove_stale_scratch(scratch_dir.parent)


def keep_scratch(scratch_dir: Path) -> None:
    """Keep the folder for the user to read: remove its owner file."""
    with contextlib.suppress(OSError):
        (scratch_dir / OWNER_FILE).unlink()


def remove_stale_scratch(folder: Path) -> None:
    """Remove the folders of this user's commands on this host whose process has ended."""
    removed = 0
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MAX_SCANNED) if _SCRATCH_NAME.fullmatch(entry.name)]
    for name in names:
        if removed < _MAX_REMOVED and _is_stale(folder / name):
            shutil.rmtree(folder / name, ignore_errors=True)
            removed += 1


def _is_stale(scratch_dir: Path) -> bool:
    """Return True for a folder of this user, made on this host, whose process is known to have
    ended.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        found = scratch_dir.lstat()
        # lstat: another user could place a link of that name in TMPDIR.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        # No link is followed and no pipe waited for: TMPDIR is shared.
        with os.fdopen(os.open(scratch_dir / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            owner = json.loads(file.read(4096))
        return (
            bool(owner["machine"] == get_host_id())
            and is_process_alive(int(owner["pid"]), str(owner["started"])) is False
        )
    return False
