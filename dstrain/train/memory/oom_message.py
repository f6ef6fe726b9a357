"""The message of a run that ran out of memory: where, what was asked for, memory by line, and the fixes in order."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil
import torch

from dstrain.host_memory import get_available_memory
from dstrain.train.memory.forecast import MemoryForecast
from dstrain.units import format_bytes


def format_message(title: str, memory: Sequence[str], fixes: Sequence[str], last_line: str) -> str:
    """Return the message: the title, lines about memory, numbered fixes, and what happens next."""
    numbered = [f"  {number}. {fix}" for number, fix in enumerate(fixes, 1)]
    what_to_do = ["to fit, set in this order:", *numbered] if numbered else []
    return "\n".join([title, *(f"  {line}" for line in memory), *what_to_do, last_line])


def describe_device_memory(device: torch.device, forecast: MemoryForecast | None) -> list[str]:
    """Return the memory of a rank by line, predicted by the plan and measured; for a CPU, that of its process."""
    predicted = [] if forecast is None else [*_iter_predicted(forecast)]
    measured = _iter_gpu_counters(device) if device.type == "cuda" else _iter_host_counters()
    return [*predicted, *measured]


def describe_host_memory() -> list[str]:
    """Return the host memory of this process and of its host by line."""
    return [*_iter_host_counters()]


def _iter_predicted(forecast: MemoryForecast) -> Iterator[str]:
    lines = [(name, num_bytes) for name, place, num_bytes in forecast.lines if place == "gpu"]
    width = max((len(name) for name, _ in lines), default=0)
    yield f"{'planned'.ljust(width)}  {format_bytes(forecast.device_bytes)} in all"
    for name, num_bytes in lines:
        yield f"  {name.ljust(width)}  {format_bytes(num_bytes)}"


def _iter_gpu_counters(device: torch.device) -> Iterator[str]:
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    yield (
        f"measured: tensors {format_bytes(allocated)}, at most {format_bytes(torch.cuda.max_memory_allocated(device))}; "
        f"reserved by torch {format_bytes(reserved)}, of which {format_bytes(reserved - allocated)} in gaps"
    )
    with suppress(RuntimeError):  # some virtual GPUs do not tell
        free, total = torch.cuda.mem_get_info(device)
        others = max(total - free - reserved, 0)
        yield f"GPU: {format_bytes(total)}, free {format_bytes(free)}, used outside torch {format_bytes(others)}"


def _iter_host_counters() -> Iterator[str]:
    with suppress(OSError, psutil.Error):
        info = psutil.Process().memory_info()
        yield f"measured: process {format_bytes(info.rss)} resident, {format_bytes(info.vms)} of addresses"
        host = psutil.virtual_memory()
        yield f"host: {format_bytes(host.total)}, available to this process {format_bytes(get_available_memory())}"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield f"limit of addresses of the process (ulimit -v): {format_bytes(limit)}"
