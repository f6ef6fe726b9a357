"""Peak memory of GPU and host, and GPU utilization."""

from __future__ import annotations

import resource
import sys

import torch

from dstrain.distributed.world import World

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
    """Return peak memory of the rank with most, and `gpu_utilization` as mean over ranks. Collective."""
    device = world.device
    values_by_rank = world.gather((peak_memory_gib(device), host_memory_gib(), gpu_utilization(device)))
    peak, host, busy = (
        [value for value in values if value is not None] for values in zip(*values_by_rank, strict=True)
    )
    row = {"peak_memory_gib": max(peak)} if peak else {}
    row["host_memory_gib"] = max(host)
    if busy:
        row["gpu_utilization"] = sum(busy) / len(busy)
    return row
