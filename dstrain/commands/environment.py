"""What this machine offers to a run, a line per property with its problem and fix: for selftest and doctor."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from dstrain.cache import cache_root
from dstrain.errors import UsageError, one_line
from dstrain.host_limits import count_available_cores, get_available_memory
from dstrain.launch.probe import check_loopback, find_route_interface, free_port
from dstrain.launch.topology import gpus_support_bf16, list_gpu_capabilities, visible_gpus
from dstrain.patching import installed_version
from dstrain.planner.workload import detect_gpu_bytes, host_bytes
from dstrain.resources import TRITON_FIX, find_c_compiler, get_extensions_dir, list_missing_for_triton
from dstrain.torchvision_fit import explain_import_error, find_torchvision_problem, make_torchvision_fix
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
    is_fault: bool = False
    """True if the problem stops a run."""


def collect_lines(folder: Path) -> list[EnvironmentLine]:
    """Return the lines of this machine that `selftest` and `doctor` share; `folder` is on the disk of the runs.

    Imports no torch.
    """
    gpus = visible_gpus(os.environ)
    return [
        EnvironmentLine("system", f"{platform.platform(terse=True)}, Python {platform.python_version()}"),
        _libraries(),
        _devices(gpus),
        _cuda(gpus),
        _compiler(gpus),
        _triton(gpus),
        _torchvision(),
        _shared_memory(gpus),
        _disk("free disk", folder, "TMPDIR"),
        _ports(),
    ]


def _libraries() -> EnvironmentLine:
    names = ("torch", "deepspeed", "transformers", "peft", "accelerate")
    found = {name: installed_version(name) for name in names}
    missing = [name for name, version in found.items() if version is None]
    warning = f"{', '.join(missing)} not installed; run `pip install dstrain` again" if missing else ""
    return EnvironmentLine("libraries", ", ".join(f"{name} {found[name] or 'missing'}" for name in names), warning)


def _devices(gpus: int) -> EnvironmentLine:
    cores = f"{count_available_cores()} cores, {format_bytes(host_bytes())} of host memory free"
    if not gpus:
        return EnvironmentLine("devices", f"no GPU; {cores}")
    free = ", ".join(format_bytes(size) for size in detect_gpu_bytes(os.environ)[0])
    return EnvironmentLine("devices", f"{gpus} GPU{'s' * (gpus > 1)} ({free or 'unknown memory'} free); {cores}")


def _cuda(gpus: int) -> EnvironmentLine:
    built, nccl = _torch_cuda_version(), installed_version("nvidia-nccl-cu13") or installed_version("nvidia-nccl-cu12")
    value = f"torch built for CUDA {built}, NCCL {nccl or 'as built into torch'}" if built else "torch built for CPUs"
    warning = ""
    if gpus and not built:
        warning = "there are GPUs, but this torch cannot use them; install torch for CUDA (docs/quickstart.md)"
    capabilities = list_gpu_capabilities() if gpus else []
    if built and int(built.split(".")[0]) >= 13 and capabilities and min(capabilities) < (7, 5):
        major, minor = min(capabilities)
        problem = f"a GPU has compute capability {major}.{minor}, and CUDA {built} has no kernels below 7.5"
        warning = f"{problem}; install torch for CUDA 12.6 (docs/gpu-hosts.md)"
    return EnvironmentLine("CUDA", value, warning)


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


def _triton(gpus: int) -> EnvironmentLine:
    """Return what Triton compiles with at run time: fused kernels, attention in fp32, and all below capability 8.0."""
    missing = list_missing_for_triton(os.environ)
    kernels = installed_version("liger-kernel") or "not installed"
    compiler = f"compiles with {find_c_compiler(os.environ)} and Python.h: {'missing' if missing else 'ok'}"
    value = f"liger-kernel: {kernels}; {compiler}"
    warning = ""
    if gpus and missing:
        needs = f"packed batches in fp32, and on GPUs below compute capability 8.0, need {' and '.join(missing)}"
        warning = f"{needs}; {TRITON_FIX}"
    return EnvironmentLine("Triton", value, warning)


def _torchvision() -> EnvironmentLine:
    version, problem = installed_version("torchvision"), find_torchvision_problem(loads=False)
    if version is None:
        needs = "processors of many image-text models need it (docs/tasks/vlm.md)"
        return EnvironmentLine("torchvision", f"not installed; {needs}: {make_torchvision_fix()}")
    value = f"{version}, with torch {installed_version('torch')}"
    return EnvironmentLine("torchvision", value, "" if problem is None else f"{problem}; {make_torchvision_fix()}")


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


def _disk(name: str, folder: Path, variable: str) -> EnvironmentLine:
    """Return the free space in a folder, or where it will be; `variable` names another one."""
    try:
        free = shutil.disk_usage(nearest_folder(folder)).free
    except OSError as error:
        return EnvironmentLine(
            name, f"unknown in {folder}", f"its file system does not answer ({error.strerror}); mount it again"
        )
    fix = f"free some, or set {variable} to a larger disk"
    small = f"less than {format_bytes(MIN_DISK_BYTES)}; {fix}" if free < MIN_DISK_BYTES else ""
    return EnvironmentLine(name, f"{format_bytes(free)} free in {folder}", small)


def _ports() -> EnvironmentLine:
    """Return whether processes of this host can connect to each other."""
    host = socket.gethostname()
    try:
        check_loopback()
        port = free_port()
    except (OSError, UsageError) as error:
        return EnvironmentLine("ports", "unusable", str(error), is_fault=True)
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        fix = "add it to /etc/hosts; launches over several hosts need it"
        return EnvironmentLine("ports", f"port {port} is free", f"this host's name, {host}, has no address; {fix}")
    return EnvironmentLine("ports", f"port {port} is free; {host} has an address")


def show_environment(lines: Sequence[EnvironmentLine]) -> str:
    """Return a line per property, and its warning below."""
    shown = []
    for line in lines:
        shown.append(f"{line.name:14} {line.value}")
        shown += [f"{'':14} warning: {line.warning}"] if line.warning else []
    return "\n".join(shown)


MIN_MEMORY_BYTES, MIN_OPEN_FILES, MIN_PROCESSES = 4 << 30, 4096, 1024
_IMPORT_TIMEOUT_SECONDS = 50.0
_IMPORTS = (
    "import torch, deepspeed, transformers, peft; print('found', torch.cuda.is_available(), torch.cuda.device_count())"
)


def collect_host_lines(folder: Path, several_hosts: bool) -> list[EnvironmentLine]:
    """Return the lines of `collect_lines`, and those that only `doctor` looks at; `folder` is where runs are written.

    Takes some seconds: another process imports torch and DeepSpeed.
    """
    gpus = visible_gpus(os.environ)
    return [
        *collect_lines(nearest_folder(folder)),
        _imports(gpus),
        _precision(gpus),
        _memory(),
        _limits(gpus),
        _kernels(),
        _run_folder(folder),
        _disk("cache disk", cache_root(), "DSTRAIN_CACHE"),
        _disk("temporary disk", Path(tempfile.gettempdir()), "TMPDIR"),
        *([_host_name()] if several_hosts else []),
    ]


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or the nearest one above that exists."""
    # Path.is_dir raises for a folder that this user may not enter.
    return next(path for path in (folder, *folder.parents) if os.path.isdir(path))


def _imports(gpus: int) -> EnvironmentLine:
    """Return whether the libraries can be imported, and torch sees the GPUs."""
    env: Mapping[str, str] = os.environ if gpus else {**os.environ, "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _IMPORTS],
            capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_SECONDS, check=False, env=env,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        slow = f"importing torch and DeepSpeed took more than {_IMPORT_TIMEOUT_SECONDS:g} s; install Python on a local disk"
        return EnvironmentLine("imports", "slow", slow)
    words = next((line.split() for line in done.stdout.splitlines() if line.startswith("found ")), [])
    if not words:
        last = one_line((done.stderr.strip().splitlines() or ["no message"])[-1])
        fix = "run `pip install dstrain` again in this environment"
        known = explain_import_error(ImportError(last))
        return EnvironmentLine("imports", "failed", f"{last}; {fix}" if known is None else str(known), is_fault=True)
    if gpus and words[1] != "True":
        problem = "torch sees no GPU: the driver is too old for it, or torch was built for CPUs (docs/gpu-hosts.md)"
        return EnvironmentLine(
            "imports", "no GPU", f"{problem}; update the driver, or install another torch", is_fault=True
        )
    return EnvironmentLine("imports", "torch, deepspeed, transformers and peft can be imported")


def _precision(gpus: int) -> EnvironmentLine:
    supports = gpus_support_bf16() if gpus else True
    fix = "a GPU here has no bf16; `precision: auto` uses fp16 (docs/memory.md)" if supports is False else ""
    return EnvironmentLine("precision", "fp16" if supports is False else "bf16", fix)


def _memory() -> EnvironmentLine:
    free = get_available_memory()
    fix = "end other processes, or raise the memory limit of the container or job"
    small = f"less than {format_bytes(MIN_MEMORY_BYTES)}; {fix}" if free < MIN_MEMORY_BYTES else ""
    return EnvironmentLine("host memory", f"{format_bytes(free)} free", small)


def _limits(gpus: int) -> EnvironmentLine:
    """Return the hard limits of open files, processes and locked memory; dstrain raises the soft limit of files."""
    files, processes, locked = (
        resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    )
    problems = []
    if 0 <= files < MIN_OPEN_FILES:
        problems.append(f"ulimit -Hn is below {MIN_OPEN_FILES}: many ranks and hosts need more open files")
    if 0 <= processes < MIN_PROCESSES:
        problems.append(f"ulimit -Hu is below {MIN_PROCESSES}: threads count too")
    if locked >= 0 and gpus and Path("/dev/infiniband").is_dir():
        problems.append("ulimit -Hl is limited: InfiniBand needs locked memory")
    shown = [str(value) if value >= 0 else "unlimited" for value in (files, processes, locked)]
    fix = (
        "; raise it in /etc/security/limits.conf, or in the service that starts sshd or the container"
        if problems
        else ""
    )
    value = f"{shown[0]} open files, {shown[1]} processes, {shown[2]} bytes of locked memory"
    return EnvironmentLine("limits", value, "; ".join(problems) + fix)


def _kernels() -> EnvironmentLine:
    built = sorted({path.parent.name for path in get_extensions_dir(os.environ).glob("**/*.so")})
    has_libaio = ctypes.util.find_library("aio") is not None or Path("/usr/include/libaio.h").exists()
    warning = "" if has_libaio else "libaio is missing, which zero3_nvme needs; install it (apt install libaio-dev)"
    return EnvironmentLine("kernels", f"built: {', '.join(built) or 'none'}", warning)


def _run_folder(folder: Path) -> EnvironmentLine:
    """Return whether this host can write where runs are written."""
    nearest = nearest_folder(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".dstrain-doctor-"):
            return EnvironmentLine("run folder", f"{nearest} can be written")
    except OSError as error:
        problem = f"{nearest} cannot be written ({error.strerror})"
        return EnvironmentLine(
            "run folder", "unusable", f"{problem}; give another --run-dir, or the permission", is_fault=True
        )


def _host_name() -> EnvironmentLine:
    """Return to which address this host's own name leads: gloo would listen there, so that no other host reaches it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if address and not address.startswith("127."):
        return EnvironmentLine("host name", f"{name} is {address}")
    interface = find_route_interface(name)
    shown = f"{name} is {address or 'unknown'}"
    if interface:
        return EnvironmentLine("host name", f"{shown}; gloo uses {interface}, as dstrain tells it")
    fix = f"write its real address into /etc/hosts, or set GLOO_SOCKET_IFNAME on {name}"
    return EnvironmentLine("host name", shown, f"other hosts cannot reach that address; {fix}")
