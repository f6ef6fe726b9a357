"""Processes of a launch: find, signal, wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

import psutil

STOPPED_STATES = ("T", "t")
"""Kernel states of a process that SIGSTOP or a debugger has stopped."""


def descendants(excluded_pids: set[int]) -> list[psutil.Process]:
    """Return all running descendants, except the children in `excluded_pids`, which are older than the launch."""
    processes = []
    for child in psutil.Process().children():
        if child.pid not in excluded_pids:
            with contextlib.suppress(psutil.Error):
                processes += [child, *child.children(recursive=True)]
    return [process for process in processes if process_state(process.pid) not in ("gone", "Z")]


def process_state(pid: int) -> str:
    """Return the kernel's state letter (Z: ended, not yet waited for), or `gone`."""
    fields = _read_stat(pid)
    return fields[0] if fields else "gone"


def start_time(pid: int) -> str:
    """Return the start time in clock ticks after boot (field 22 in proc(5)); '' if it cannot be read."""
    fields = _read_stat(pid)
    return fields[19] if fields else ""


def is_process_alive(pid: int, started_at: str) -> bool | None:
    """Return True if the process with this start time runs on this host; None if unknown (hidepid in proc(5))."""
    if process_state(pid) == "Z":
        return False
    # PermissionError: another user's process has the pid, and its start time, below, tells if it is the one.
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError, ValueError):
            return False
    now = start_time(pid)
    return now == started_at if now and started_at else None


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: the name before it may contain blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def kill_descendants(excluded_pids: set[int], kept_pids: Collection[int]) -> list[int]:
    """SIGKILL all descendants, for at most 10 s, and reap the orphans, but not `kept_pids`, whose exit codes are read later.

    Returns the pids that did not end.
    """

    deadline = time.monotonic() + 10
    while True:
        left = descendants(excluded_pids)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for child in psutil.Process().children():
            if child.pid not in excluded_pids and child.pid not in kept_pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        # Again until none is left: a process may have forked between the listing and the signal.
        if not left or time.monotonic() > deadline:
            return [process.pid for process in left]
        time.sleep(0.02)
