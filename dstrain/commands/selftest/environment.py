"""What the selftest prints first: versions, devices, compiler, memory, disk and ports of this machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from dstrain.errors import UsageError
from dstrain.launch.command import check_loopback, free_port
from dstrain.launch.threads import count_available_cores
from dstrain.launch.topology import visible_gpus
from dstrain.planner.cluster import detect_gpu_bytes, host_bytes
from dstrain.units import format_bytes

MIN_DISK_BYTES, MIN_SHM_BYTES = 1 << 30, 1 << 30
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class EnvironmentLine:
    """A property of this machine, and what is wrong with it."""

    name: str
    value: str
    warning: str = ""
    """Problem and fix; empty where all is well."""


def collect_lines(folder: Path) -> list[EnvironmentLine]:
    """Return the lines of this machine; `folder` is where the runs are written. Imports no torch."""
    gpus = visible_gpus(os.environ)
    lines: Sequence[Callable[[], EnvironmentLine]] = (
        lambda: EnvironmentLine("system", f"{platform.platform(terse=True)}, Python {platform.python_version()}"),
        _libraries,
        lambda: _devices(gpus),
        lambda: _cuda(gpus),
        lambda: _compiler(gpus),
        lambda: _shared_memory(gpus),
        lambda: _disk(folder),
        _ports,
    )
    return [line() for line in lines]


def _libraries() -> EnvironmentLine:
    names = ("torch", "deepspeed", "transformers", "peft", "accelerate")
    found = {name: _version(name) for name in names}
    missing = [name for name, version in found.items() if version is None]
    warning = f"{', '.join(missing)} not installed; run `pip install dstrain` again" if missing else ""
    return EnvironmentLine("libraries", ", ".join(f"{name} {found[name] or 'missing'}" for name in names), warning)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices(gpus: int) -> EnvironmentLine:
    cores = f"{count_available_cores()} cores, {format_bytes(host_bytes())} of host memory free"
    if not gpus:
        return EnvironmentLine("devices", f"no GPU; {cores}")
    free = ", ".join(format_bytes(size) for size in detect_gpu_bytes(os.environ)[0])
    return EnvironmentLine("devices", f"{gpus} GPU{'s' * (gpus > 1)} ({free or 'unknown memory'} free); {cores}")


def _cuda(gpus: int) -> EnvironmentLine:
    built, nccl = _torch_cuda_version(), next(filter(None, map(_version, _nccl_packages())), None)
    value = f"torch built for CUDA {built}, NCCL {nccl or 'as built into torch'}" if built else "torch built for CPUs"
    warning = ""
    if gpus and not built:
        warning = "there are GPUs, but this torch cannot use them; install torch for CUDA (docs/quickstart.md)"
    return EnvironmentLine("CUDA", value, warning)


def _nccl_packages() -> list[str]:
    return [f"nvidia-nccl-cu{version}" for version in (13, 12)]


def _torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, read from its file: importing torch takes seconds."""
    spec = util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    found = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _compiler(gpus: int) -> EnvironmentLine:
    compiler = next(filter(None, map(shutil.which, ("g++", "c++"))), None)
    nvcc = shutil.which("nvcc")
    value = f"{_first_line(compiler) if compiler else 'no C++ compiler'}{f'; nvcc: {nvcc}' if nvcc else ''}"
    needs = [name for name, found in (("g++", compiler), ("nvcc of the CUDA toolkit", nvcc or not gpus)) if not found]
    warning = f"presets that offload compile a kernel and need {' and '.join(needs)}; install it" if needs else ""
    return EnvironmentLine("compiler", value, warning)


def _first_line(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return program
    return (done.stdout.splitlines() or [program])[0]


def _shared_memory(gpus: int) -> EnvironmentLine:
    try:
        free = shutil.disk_usage(SHM).free
    except OSError:
        return EnvironmentLine("shared memory", "none", f"there is no {SHM}, which NCCL needs; mount a tmpfs there")
    small = gpus > 1 and free < MIN_SHM_BYTES
    warning = (
        f"NCCL may fail below {format_bytes(MIN_SHM_BYTES)}; start the container with --shm-size=8g" if small else ""
    )
    return EnvironmentLine("shared memory", f"{format_bytes(free)} free in {SHM}", warning)


def _disk(folder: Path) -> EnvironmentLine:
    free = shutil.disk_usage(folder).free
    small = free < MIN_DISK_BYTES
    warning = f"the selftest needs {format_bytes(MIN_DISK_BYTES)}; set TMPDIR to a larger disk" if small else ""
    return EnvironmentLine("free disk", f"{format_bytes(free)} in {folder}", warning)


def _ports() -> EnvironmentLine:
    """Return whether processes of this host can connect to each other."""
    host = socket.gethostname()
    try:
        check_loopback()
        port = free_port()
    except (OSError, UsageError) as error:
        return EnvironmentLine("ports", "unusable", str(error))
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        fix = "add it to /etc/hosts; launches over several hosts need it"
        return EnvironmentLine("ports", f"port {port} is free", f"this host's name, {host}, has no address; {fix}")
    return EnvironmentLine("ports", f"port {port} is free; {host} has an address")
