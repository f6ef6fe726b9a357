"""Machines of a planned run: processes, hosts, and the memory of each GPU and host."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dstrain.errors import UsageError

GPU_MEMORY_ENV = "DSTRAIN_GPU_MEMORY"
"""Environment variable with the memory that a run may use per GPU, or per process on a CPU: `24GiB`."""
COMMON_GPU_BYTES = tuple(size * 2**30 for size in (8, 12, 16, 24, 40, 80))
"""Sizes of a plan on a machine without a GPU."""
MAX_NUMBER = 1e18
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processes of a run: one per GPU, the same number on each host."""

    gpus_per_node: int = 1
    nodes: int = 1
    kind: Literal["cuda", "cpu"] = "cuda"
    bf16: bool = True
    """True where the GPUs support bfloat16."""

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.gpus_per_node * self.nodes


MIN_BYTES = 2**20
"""A number without a unit below this was meant in GiB or MiB."""


def parse_bytes(text: str, option: str) -> int:
    """Return `24GiB`, `24G` or `24 GB` as bytes; units are powers of 1024. Raises UsageError naming the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text, re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < MAX_NUMBER:
        raise UsageError(f"{option}: {text!r} is not a size of memory; write it like 24GiB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < MIN_BYTES:
        what = "means bytes, less than any GPU has" if not match[2] else "is less than any GPU has"
        raise UsageError(f"{option}: {text!r} {what}; write {match[1]}GiB")
    return size


def detect_gpu_bytes(env: Mapping[str, str]) -> tuple[list[int], str]:
    """Return the free bytes of each visible GPU, and where they were read.

    DSTRAIN_GPU_MEMORY stands for any GPU. Without a driver the list is empty. Raises UsageError for a wrong variable.
    """
    if capped := env.get(GPU_MEMORY_ENV):
        return [parse_bytes(capped, GPU_MEMORY_ENV)], GPU_MEMORY_ENV
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return [], "no visible GPU"
    found, source = _ask_nvml() or (_ask_nvidia_smi(), "nvidia-smi")
    return _visible(found, env.get("CUDA_VISIBLE_DEVICES")), source


def _visible(found: list[int], devices: str | None) -> list[int]:
    """Return the sizes of the GPUs whose indices CUDA_VISIBLE_DEVICES lists; all of them for UUIDs and without it."""
    names = [name.strip() for name in (devices or "").split(",")]
    if not all(name.isdecimal() and int(name) < len(found) for name in names):
        return found
    return [found[int(name)] for name in names]


def host_bytes() -> int:
    """Return the host's available memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def _ask_nvml() -> tuple[list[int], str] | None:
    """Return the free bytes of the GPUs through pynvml; None without the package or a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles], "pynvml"
    except Exception:  # NVMLError derives from Exception, and its subclasses depend on the driver
        return None


def _ask_nvidia_smi() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) * 2**20 for line in done.stdout.split() if line.isdecimal()] if done.returncode == 0 else []
