"""Cores and memory that this process may use on its host and in its cgroups (Slurm, containers); threads of each rank;
processes that were killed for memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.units import format_bytes

CGROUP_ROOT, OWN_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VMSTAT_FILE, KERNEL_LOG = Path("/proc/vmstat"), Path("/dev/kmsg")


UNLIMITED = 2**60
"""Limit from which on version 1 limits nothing: it has no word for it, and writes the largest number of pages."""


@dataclass(frozen=True)
class CgroupLimit:
    """Files of a cgroup with a limit of memory."""

    limit_file: Path
    usage_file: Path


def iter_cgroup_paths(controller: str = "memory") -> Iterator[tuple[Path, bool]]:
    """Yield (folder, True for version 1) of each cgroup of this process that has a controller, from the inside out."""
    try:
        lines = OWN_CGROUP_FILE.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        controllers, colon, path = line.partition(":")[2].partition(":")
        if colon and (not controllers or controller in controllers.split(",")):  # no controllers: version 2
            root = CGROUP_ROOT / controllers
            inside = root / path.lstrip("/")
            # Each parent group may have a lower limit.
            for group in (inside, *inside.parents):
                if not group.is_relative_to(root):
                    break
                yield group, bool(controllers)


def count_available_cores() -> int:
    """Return the number of CPU cores that this process may run on, or has the time of by the quota of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group, is_v1 in iter_cgroup_paths("cpu"):
        quota = _read_cpu_quota(group, is_v1)
        if quota is not None:
            cores = min(cores, max(1, math.ceil(quota)))
    return cores


def _read_cpu_quota(group: Path, is_v1: bool) -> float | None:
    """Return the cores whose time a cgroup may use; None where it has no limit."""
    try:
        if is_v1:
            quota, period = ((group / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        else:
            quota, period = (group / "cpu.max").read_text().split()  # such as `400000 100000`, or `max 100000`
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None  # -1: no limit


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


def get_available_memory(limits: Sequence[CgroupLimit] | None = None) -> int:
    """Return the bytes available on the host, or in a cgroup of this process if it has less.

    `limits`: those of `find_cgroup_limits`, which takes longer than the rest; None to look them up now.
    """
    import psutil

    limits = find_cgroup_limits() if limits is None else limits
    return min([int(psutil.virtual_memory().available), *_iter_available(limits)])


def find_cgroup_limits() -> tuple[CgroupLimit, ...]:
    """Return the limits of this process's cgroups, of version 2 and 1, without those that limit nothing."""
    names = {False: ("memory.max", "memory.current"), True: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    limits = [CgroupLimit(*(group / name for name in names[is_v1])) for group, is_v1 in iter_cgroup_paths()]
    return tuple(limit for limit in limits if (_read_number(limit.limit_file) or UNLIMITED) < UNLIMITED)


def _iter_available(limits: Sequence[CgroupLimit]) -> Iterator[int]:
    """Yield the bytes below each limit. The page cache counts as used."""
    for limit in limits:
        most, used = _read_number(limit.limit_file), _read_number(limit.usage_file)
        if most is not None and used is not None:
            yield max(0, most - used)


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None where there is none, or the word max."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class OomKills:
    """Numbers of processes that the kernel has killed because memory ran out."""

    in_cgroups: int | None = None
    """In the cgroups of this process; None where no cgroup counts them."""
    on_host: int | None = None
    """On the whole host; None where the kernel does not tell."""


HOST_MEMORY_FIX = (
    "lower data.workers and data.prefetch, start fewer processes per host, use a preset without offloading to the host, "
    "or raise the memory limit of the container or job"
)
"""Fix for a process that the kernel killed for memory."""


def describe_oom_kill(pid: int, before: OomKills) -> str:
    """Return why the kernel is known to have killed a process for memory since `before`; empty without evidence.

    A line of the kernel's log about this process is certain; counters tell that some process was killed. Without one
    that grew a line is not looked for: it may be about an earlier process with the same number.
    """
    now = read_oom_kills()
    in_cgroup = (now.in_cgroups or 0) > (before.in_cgroups or 0)
    on_host = (now.on_host or 0) > (before.on_host or 0)
    if not in_cgroup and not on_host:
        return ""
    if (resident := _find_in_kernel_log(pid)) is not None:
        return f"the kernel killed it because memory was full (kernel log: {resident} resident)"
    if in_cgroup:
        return "the kernel killed a process because the memory of this cgroup was full (its oom_kill counter grew)"
    return "the kernel killed a process because memory was full (oom_kill in /proc/vmstat grew)"


def _find_in_kernel_log(pid: int) -> str | None:
    """Return the resident memory of a killed process as the kernel logged it; None where that cannot be read."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:  # one record per read; EAGAIN after the last one
                with contextlib.suppress(BrokenPipeError):  # a record was overwritten meanwhile
                    lines.append(os.read(log, 8192).decode(errors="replace"))
                if lines and not lines[-1]:
                    break
        finally:
            os.close(log)
    for line in reversed(lines):
        if f"Killed process {pid} (" in line:
            resident = re.search(r"anon-rss:(\d+)kB", line)
            return format_bytes(int(resident[1]) * 1024) if resident else "an unknown amount"
    return None


def read_oom_kills() -> OomKills:
    """Return the counters of this host. Never raises."""
    counts = [count for group, is_v1 in iter_cgroup_paths() if (count := _read_cgroup_kills(group, is_v1)) is not None]
    return OomKills(max(counts, default=None), _read_counter(VMSTAT_FILE))


def _read_cgroup_kills(group: Path, is_v1: bool) -> int | None:
    # memory.events of a parent counts its children too; memory.oom_control (version 1) counts its own group.
    return _read_counter(group / ("memory.oom_control" if is_v1 else "memory.events"))


def _read_counter(path: Path) -> int | None:
    """Return the value of the line `oom_kill N`."""
    try:
        line = re.search(r"^oom_kill (\d+)$", path.read_text(), re.M)
    except (OSError, ValueError):
        return None
    return int(line[1]) if line else None
