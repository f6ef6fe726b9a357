"""Processes of a launch: find, signal, wait; number of threads and cores for each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping
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


def threads_per_process(local_world_size: int, cores: int) -> int:
    """Return an equal share of the cores.

    Set explicitly: torchrun would use 1 thread, DeepSpeed all cores.
    """
    return max(1, cores // max(1, local_world_size))


def thread_environment(env: Mapping[str, str], local_world_size: int, cores: int) -> dict[str, str]:
    """Return the environment with the thread counts of the libraries that read them when they are loaded.

    The worker also calls torch.set_num_threads: under torchrun or srun dstrain does not set its environment.
    """
    threads = str(threads_per_process(local_world_size, cores))
    return {**env, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def describe_ignored_threads(env: Mapping[str, str], threads: int | None) -> str:
    """Return why the OMP_NUM_THREADS of `env` is not used; empty if it is not set, or has this number of threads.

    `threads`: of each process; None where it differs between hosts. torchrun sets 1 itself if the variable is not set.
    """
    value = env.get("OMP_NUM_THREADS", "")
    is_set_by_torchrun = value == "1" and "TORCHELASTIC_RUN_ID" in env
    if value in ("", str(threads)) or is_set_by_torchrun:
        return ""
    share = "its share of the cores" if threads is None else f"its share of the cores, {threads}"
    reason = "because sums depend on the number, and launchers set different ones"
    return f"OMP_NUM_THREADS={value} is not used: each process has {share}, {reason}; `taskset` limits the cores"
