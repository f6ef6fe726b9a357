"""Lease files: format, lookup of the latest one, and atomic exclusive creation."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from dstrain.errors import one_line

STALE_LISTING_SECONDS = 90.0
"""Time for which a listing that names a missing file is read again: Linux's NFS client caches one
for up to 60 s (acdirmax in nfs(5))."""
MAX_LEASE_BYTES = 64 * 1024
_LEASE_NAME = re.compile(r"lease-([0-9]{8}|[1-9][0-9]{8,})\.json")
_STALE_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class LeaseHolder:
    """Content of a lease file; the fields are its keys."""

    launch: str
    host: str
    machine: str
    pid: int
    started: str
    """Start time of the process in clock ticks after boot: pids are reused."""
    since: str
    """Local time, for display only."""
    folder: int
    """Inode of the run folder: a copy of the folder is not held."""
    beat: str

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on {self.host}, since {self.since}")


def read_latest_lease(folder: Path) -> tuple[int, bytes | None]:
    """Return the highest number and its file's content; (0, None) if there is no lease.

    Raises OSError.
    """
    until = None
    while True:
        number = max((parse_lease_number(name) for name in os.listdir(folder)), default=0)
        if not number:
            return 0, None
        try:
            return number, read_lease_file(lease_path(folder, number))
        except OSError as fault:  # removed meanwhile: a higher number exists now
            if fault.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            until = until or time.monotonic() + STALE_LISTING_SECONDS
            if time.monotonic() > until:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from fault
        time.sleep(_STALE_POLL_SECONDS)


def lease_path(folder: Path, number: int) -> Path:
    """Return the lease file with this number."""
    return folder / f"lease-{number:08d}.json"


def parse_lease_number(name: str) -> int:
    """Return the number in a file name; 0 if it is not the name of a lease."""
    found = _LEASE_NAME.fullmatch(name)
    return int(found[1]) if found else 0


def read_lease_file(file: Path) -> bytes:
    """Return a file's content; never follow a link, nor wait for the writer of a pipe. Raises OSError."""
    # Opened on each call: NFS then asks its server for the current content (close-to-open
    # consistency).
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        return opened.read(MAX_LEASE_BYTES)


def parse_holder(content: bytes) -> LeaseHolder | None:
    """Return the holder in a lease file; None if the content is not a lease."""
    try:
        holder = LeaseHolder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = LeaseHolder.__dataclass_fields__.values()
    return holder if all(type(getattr(holder, kind.name)).__name__ == kind.type for kind in kinds) else None


def parse_launch_id(content: bytes | None) -> str | None:
    """Return the launch id in a lease file; None if the content is not a lease."""
    holder = parse_holder(content) if content is not None else None
    return holder.launch if holder else None


def format_heartbeat(count: int) -> str:
    """Return a heartbeat of fixed width, so that it can be overwritten in place."""
    return f"beat-{count:012d}"


RELEASED_HEARTBEAT = "given-back".ljust(len(format_heartbeat(0)), "-")
"""Heartbeat of a released lease."""


def link_exclusive(temporary: Path, target: Path) -> bool:
    """Link a file to a second name; return False if that name exists.

    An NFS client that repeats a request after a lost answer gets an error that the link
    exists, although it created it: then the contents are equal (open(2), O_EXCL).
    """
    try:
        os.link(temporary, target)
        return True
    except FileExistsError:
        pass  # another launch's file, or ours after a repeated NFS request: compared below
    except OSError:  # a file system without hard links; the errno differs between file systems
        with contextlib.suppress(FileExistsError):
            _copy_exclusive(temporary, target)
            return True
    with contextlib.suppress(OSError):  # removed meanwhile: not ours
        return read_lease_file(target) == read_lease_file(temporary)
    return False


def _copy_exclusive(temporary: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(temporary.read_bytes())
