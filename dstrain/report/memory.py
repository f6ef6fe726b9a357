"""How much memory this process has held at most, and how busy the device is."""

from __future__ import annotations

import resource
import sys

import torch

from dstrain.distributed.world import World

GIB = 2**30


def peak_memory_gib(device: torch.device) -> float | None:
    """Most memory that tensors held on the device at once since the process started; None off CUDA."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def host_memory_gib() -> float:
    """Most memory this process held on the host since it started, without its data workers."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # Linux counts in KiB, macOS in bytes


def gpu_utilization(device: torch.device) -> float | None:
    """Percent of the last moments in which the GPU computed; None where the device does not tell."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.utilization(device))
    except ModuleNotFoundError:
        return None  # nvidia-ml-py is not installed
    except Exception as error:
        # A slice of a GPU (MIG) and some virtual GPUs refuse the question. NVML's error class can
        # be named only where nvidia-ml-py is installed, and torch raises it as it is.
        if type(error).__name__ in ("NVMLError_NotSupported", "NVMLError_NoPermission"):
            return None
        raise


def memory_metrics(world: World) -> dict[str, float]:
    """`peak_memory_gib` and `host_memory_gib` of the rank with most, `gpu_utilization` over all ranks. Collective."""
    device = world.device
    told = world.gather((peak_memory_gib(device), host_memory_gib(), gpu_utilization(device)))
    peak, host, busy = ([value for value in values if value is not None] for values in zip(*told, strict=True))
    row = {"peak_memory_gib": max(peak)} if peak else {}
    row["host_memory_gib"] = max(host)
    if busy:
        row["gpu_utilization"] = sum(busy) / len(busy)
    return row
