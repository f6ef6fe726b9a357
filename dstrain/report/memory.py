"""Memory of GPU and host, now and at most, and GPU utilization."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import psutil
import torch

from dstrain.distributed.world import World
from dstrain.host_limits import CgroupLimit, find_cgroup_limits, get_available_memory
from dstrain.report.observe import Observation, observing

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float | None:
    """Return peak GiB of tensors on the device since the process started; None without CUDA."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def host_memory_gib() -> float:
    """Return peak GiB of this process on the host since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # Linux counts in KiB, macOS in bytes


def gpu_utilization(device: torch.device) -> float | None:
    """Return the percent of the last sample period in which the GPU was busy; None if it is not reported.

    NVML may fail while CUDA goes on: the driver package was upgraded under the run, another GPU was lost, the GPU is a
    MIG slice.
    """
    if device.type != "cuda":
        return None
    return _utilization.read(lambda: float(torch.cuda.utilization(device)))


def _lacks_utilization(error: Exception) -> bool:
    """Return True for the error of a platform without this value."""
    # nvidia-ml-py is not installed; or the query is refused, as for MIG slices and some virtual GPUs. torch passes
    # NVML's error on, whose class can be imported only if nvidia-ml-py is installed.
    names = ("ModuleNotFoundError", "NVMLError_NotSupported", "NVMLError_NoPermission")
    return type(error).__name__ in names


_utilization = Observation("gpu_utilization", _lacks_utilization)


def memory_metrics(world: World) -> dict[str, float]:
    """Return the columns of memory in a row of metrics, in GiB: of the rank with most, of the host with least. Collective.

    `gpu_utilization` is the mean over ranks. A value that this platform does not tell is left out.
    """
    ranks = world.gather(_measure_rank(world.device))
    values = {name: [rank[name] for rank in ranks if name in rank] for name in REDUCTIONS}
    return {name: reduce(values[name]) for name, reduce in REDUCTIONS.items() if values[name]}


def _measure_rank(device: torch.device) -> dict[str, float]:
    """Return the columns of this rank that can be read."""
    columns = {}
    with observing("memory of the process"):
        columns["host_memory_gib"] = host_memory_gib()
        columns["resident_memory_gib"] = psutil.Process().memory_info().rss / GIB
    with observing("available host memory"):
        columns["available_memory_gib"] = get_available_memory(_find_own_limits()) / GIB
    if device.type != "cuda":
        return columns
    with observing("memory of the GPU"):
        stats = torch.cuda.memory_stats(device)  # once: each function of a single number reads all of them
        columns["peak_memory_gib"] = stats.get("allocated_bytes.all.peak", 0) / GIB
        columns["allocated_memory_gib"] = stats.get("allocated_bytes.all.current", 0) / GIB
        columns["reserved_memory_gib"] = stats.get("reserved_bytes.all.current", 0) / GIB
    with observing("pinned memory"):
        columns["pinned_memory_gib"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / GIB
    busy = gpu_utilization(device)
    return columns if busy is None else columns | {"gpu_utilization": busy}


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


@dataclass(frozen=True)
class PeakBytes:
    """Most memory that a process has taken since its start, in bytes; None for what cannot be read."""

    tensors: int | None
    """Of tensors on the GPU, as `torch.cuda.max_memory_allocated` counts them; None on a CPU."""
    total: int | None
    """Of the GPU: what torch's allocator has held, and what is used outside of it, by the CUDA context and libraries,
    and by other processes on this GPU. On a CPU: the host memory of the process."""


def measure_peak(device: torch.device) -> PeakBytes:
    """Return the most memory that this process has taken. Never raises."""
    tensors = total = None
    if device.type == "cuda":
        with observing("memory of the GPU"):
            tensors = torch.cuda.max_memory_allocated(device)
            total = torch.cuda.max_memory_reserved(device) + bytes_outside_torch(device)
    else:
        with observing("memory of the process"):
            total = round(host_memory_gib() * GIB)
    return PeakBytes(tensors, total)


def bytes_outside_torch(device: torch.device) -> int:
    """Return the bytes of a GPU that are used now outside of this process's allocator. Raises RuntimeError."""
    free, size = torch.cuda.mem_get_info(device)
    return max(size - free - torch.cuda.memory_reserved(device), 0)
