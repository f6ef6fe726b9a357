"""The file of a lease: what it says, how the newest is found, and how one is made of which there can be one only."""

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
"""A listing that names a file which is not there is asked for again for so long; Linux's NFS client keeps one for up to 60 s (acdirmax)."""
MAX_LEASE_BYTES = 64 * 1024
_LEASE_NAME = re.compile(r"lease-([0-9]{8}|[1-9][0-9]{8,})\.json")
_STALE_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class LeaseHolder:
    """What the file says."""

    launch: str
    host: str
    machine: str
    pid: int
    started: str
    """Of the process, in the kernel's clock ticks after its boot: a pid is given again."""
    since: str
    """Local time, for people."""
    folder: int
    """Inode of the run folder: a copy of it is held by nobody."""
    beat: str

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on {self.host}, since {self.since}")


def read_latest_lease(folder: Path) -> tuple[int, bytes | None]:
    """The highest number and what its file says; 0 and None where there is none. Raises OSError where it cannot be read."""
    until = None
    while True:
        number = max((parse_lease_number(name) for name in os.listdir(folder)), default=0)
        if not number:
            return 0, None
        try:
            return number, _read_file(lease_path(folder, number))
        except OSError as fault:  # a higher one is there now
            if fault.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            until = until or time.monotonic() + STALE_LISTING_SECONDS
            if time.monotonic() > until:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from fault
        time.sleep(_STALE_POLL_SECONDS)


def lease_path(folder: Path, number: int) -> Path:
    return folder / f"lease-{number:08d}.json"


def parse_lease_number(name: str) -> int:
    """Of a file's name; 0 where it is not a lease's."""
    found = _LEASE_NAME.fullmatch(name)
    return int(found[1]) if found else 0


def _read_file(file: Path) -> bytes:
    # Opened anew: a network file system then asks its server.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        return opened.read(MAX_LEASE_BYTES)


def parse_holder(content: bytes) -> LeaseHolder | None:
    """None where a file says something else."""
    try:
        holder = LeaseHolder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = LeaseHolder.__dataclass_fields__.values()
    return holder if all(type(getattr(holder, kind.name)).__name__ == kind.type for kind in kinds) else None


def parse_launch_id(content: bytes | None) -> str | None:
    holder = parse_holder(content) if content is not None else None
    return holder.launch if holder else None


def format_heartbeat(count: int) -> str:
    """Of one width, so that it can be written in place."""
    return f"beat-{count:012d}"


RELEASED_HEARTBEAT = "given-back".ljust(len(format_heartbeat(0)), "-")
"""The heartbeat of a lease that its holder gave back."""


def link_exclusive(temporary: Path, target: Path) -> bool:
    """Give a file its second name; False where that is taken.

    An NFS client that asks twice for a lost answer hears that the link is there: it is its own then (open(2), O_EXCL).
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
    with contextlib.suppress(OSError):
        return _read_file(target) == _read_file(temporary)
    return False


def _copy_exclusive(temporary: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(temporary.read_bytes())
