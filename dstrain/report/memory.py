"""Memory of GPU and host, now and at most, and GPU utilization."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import psutil
import torch

from dstrain.distributed.world import World
from dstrain.host_memory import CgroupLimit, find_cgroup_limits, get_available_memory

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float | None:
    """Return peak GiB of tensors on the device since the process started; None without CUDA."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def host_memory_gib() -> float:
    """Return peak GiB of this process on the host since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # Linux counts in KiB, macOS in bytes


def gpu_utilization(device: torch.device) -> float | None:
    """Return the percent of the last sample period in which the GPU was busy; None if it is not reported."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except ModuleNotFoundError:
        return None  # nvidia-ml-py is not installed
    except Exception as error:
        # MIG slices and some virtual GPUs refuse the query. torch passes NVML's error on, whose class
        # can be imported only if nvidia-ml-py is installed.
        if type(error).__name__ in ("NVMLError_NotSupported", "NVMLError_NoPermission"):
            return None
        raise


def memory_metrics(world: World) -> dict[str, float]:
    """Return the columns of memory in a row of metrics, in GiB: of the rank with most, of the host with least. Collective.

    `gpu_utilization` is the mean over ranks. A value that this platform does not tell is left out.
    """
    ranks = world.gather(_measure_rank(world.device))
    values = {name: [rank[name] for rank in ranks if name in rank] for name in REDUCTIONS}
    return {name: reduce(values[name]) for name, reduce in REDUCTIONS.items() if values[name]}


def _measure_rank(device: torch.device) -> dict[str, float]:
    """Return the columns of this rank."""
    found = {"host_memory_gib": host_memory_gib(), **_measure_host()}
    if device.type != "cuda":
        return found
    stats = torch.cuda.memory_stats(device)  # once: each function of a single number reads all of them
    found["peak_memory_gib"] = stats.get("allocated_bytes.all.peak", 0) / GIB
    found["allocated_memory_gib"] = stats.get("allocated_bytes.all.current", 0) / GIB
    found["reserved_memory_gib"] = stats.get("reserved_bytes.all.current", 0) / GIB
    found["pinned_memory_gib"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / GIB
    busy = gpu_utilization(device)
    return found if busy is None else found | {"gpu_utilization": busy}


def _measure_host() -> dict[str, float]:
    """Return the memory that this process holds on the host now, and what is available to it there."""
    try:
        resident = psutil.Process().memory_info().rss
        return {
            "resident_memory_gib": resident / GIB,
            "available_memory_gib": get_available_memory(_find_own_limits()) / GIB,
        }
    except (OSError, psutil.Error):  # a sandbox without /proc
        return {}


@cache
def _find_own_limits() -> tuple[CgroupLimit, ...]:
    """Return the limits of this process's cgroups, looked up once: that would be most of the time of a row."""
    return find_cgroup_limits()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


REDUCTIONS: Mapping[str, Callable[[list[float]], float]] = {
    "peak_memory_gib": max,
    "allocated_memory_gib": max,
    "reserved_memory_gib": max,
    "pinned_memory_gib": max,
    "host_memory_gib": max,
    "resident_memory_gib": max,
    "available_memory_gib": min,
    "gpu_utilization": _mean,
}
"""Column -> its value over all ranks."""


def peak_process_bytes(device: torch.device) -> int:
    """Return the most bytes that this process has taken: of the GPU, with torch's cache; on a CPU, of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return round(host_memory_gib() * GIB)
