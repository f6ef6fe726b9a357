"""Rank, world size and visible GPUs, read from what launchers set in the environment."""

from __future__ import annotations

import re
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.errors import UsageError, one_line

_TORCH_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Worker:
    """Rank of this process and how it was launched."""

    rank: int
    local_rank: int
    """Index among the processes of this host."""
    world_size: int
    launcher: str
    """deepspeed, torchrun, accelerate, openmpi, slurm, or `environment` if only RANK and WORLD_SIZE are set."""
    local_world_size: int
    """Processes on this host; the world size if the launcher does not set it."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables to add to os.environ before the process group starts; only names that are missing there. MASTER_PORT is
    not among them if one process may use any free port."""


def worker_from_env(env: Mapping[str, str]) -> Worker | None:
    """Return the worker that a launcher started with this environment; None if no launcher did. Raises UsageError.

    OpenMPI is checked before Slurm: inside an allocation `mpirun` starts its daemons with srun, so that ranks inherit
    the daemon's SLURM_PROCID.
    """
    if "MASTER_PORT" in env and not 0 < _read_int(env, "MASTER_PORT") < 65536:
        raise UsageError(
            f"the environment's MASTER_PORT is {env['MASTER_PORT']}; set it to a port, 1 to 65535, or unset it"
        )
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torch_names(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_openmpi(env)
    if _is_slurm_task(env):
        return _from_slurm(env)
    if "ACCELERATE_MIXED_PRECISION" in env:  # `accelerate launch` of one process sets no rank
        return _make_worker(env, "accelerate", 0, 0, 1, 1, {"MASTER_ADDR": "127.0.0.1"})
    return None


def _from_torch_names(env: Mapping[str, str]) -> Worker:
    """Read RANK, LOCAL_RANK and WORLD_SIZE, which DeepSpeed's launcher, torchrun and accelerate set."""
    if "LOCAL_RANK" not in env:
        raise UsageError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not, so this process cannot know its device; "
            "set LOCAL_RANK (0 if each host runs one process), or unset RANK to let dstrain launch"
        )
    rank, local_rank, world = (_read_int(env, name) for name in _TORCH_NAMES)
    if any(name.startswith("ACCELERATE_") for name in env):
        launcher = "accelerate"
    elif "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    else:
        launcher = "deepspeed" if "CROSS_RANK" in env else "environment"
    sizes = [_read_int(env, name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in env]
    found = {"MASTER_ADDR": "127.0.0.1"} if world == 1 else {}
    return _make_worker(env, launcher, rank, local_rank, world, sizes[0] if sizes else world, found)


def _from_openmpi(env: Mapping[str, str]) -> Worker:
    rank, local_rank, world = (_read_int(env, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "LOCAL_RANK", "SIZE"))
    local_size = _read_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE") if "OMPI_COMM_WORLD_LOCAL_SIZE" in env else world
    if local_size < world and "MASTER_ADDR" not in env:
        raise UsageError(
            "mpirun started processes on several hosts, but MASTER_ADDR is not set; "
            "add `-x MASTER_ADDR=<rank 0's host>` to the mpirun command"
        )
    # From the job's id, so that all ranks find the same port without talking to each other.
    job = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE") or "0"
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port_from_seed(zlib.crc32(job.encode())))}
    return _make_worker(env, "openmpi", rank, local_rank, world, local_size, found)


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Return True for one of several tasks of an srun step.

    A batch script and salloc's shell are not in a step, and a step of one task is most often `srun --pty bash`: in
    these dstrain launches its own processes.
    """
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and _count_slurm_tasks(env) > 1


def _count_slurm_tasks(env: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return _read_int(env, name) if name in env else 1


def _from_slurm(env: Mapping[str, str]) -> Worker:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not nodes and "MASTER_ADDR" not in env:
        raise UsageError("this is a Slurm step without SLURM_STEP_NODELIST; export MASTER_ADDR with rank 0's host")
    tasks = _count_slurm_tasks(env)
    # Not a fixed port: two jobs may share a node, and their ranks would connect to each other.
    seed = 101 * _read_int(env, "SLURM_JOB_ID", "0") + _read_int(env, "SLURM_STEP_ID")
    found = {"MASTER_ADDR": first_host(nodes) if nodes else "", "MASTER_PORT": str(_port_from_seed(seed))}
    counts = expand_task_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(tasks))
    node = _read_int(env, "SLURM_NODEID", "0")
    rank, local_rank = _read_int(env, "SLURM_PROCID"), _read_int(env, "SLURM_LOCALID")
    return _make_worker(env, "slurm", rank, local_rank, tasks, counts[node] if node < len(counts) else tasks, found)


def _make_worker(
    env: Mapping[str, str],
    launcher: str,
    rank: int,
    local_rank: int,
    world: int,
    local_world_size: int,
    extra_env: Mapping[str, str],
) -> Worker:
    if not (0 <= rank < world and 0 <= local_rank < local_world_size <= world):
        raise UsageError(
            f"the environment has rank {rank} of {world} and local rank {local_rank} of {local_world_size}, "
            "which is impossible; start this process through one launcher only"
        )
    names = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local_world_size}
    wanted = {name: str(value) for name, value in names.items()} | dict(extra_env)
    # What the launcher has set stays.
    missing = {name: value for name, value in wanted.items() if name not in env}
    return Worker(rank, local_rank, world, launcher, local_world_size, missing)


def _read_int(env: Mapping[str, str], name: str, default: str = "") -> int:
    value = env.get(name, default)
    if not value.isdecimal() or len(value) > 18:
        raise UsageError(
            f"the environment's {name} is '{one_line(value)}', which is not a number; unset it or let a launcher set it"
        )
    return int(value)


def _port_from_seed(seed: int) -> int:
    """Return a port below the kernel's ephemeral ones (32768 and up)."""
    return 15000 + seed % 15000


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's list of nodes: `node[01-03,7]-ib,login` -> node01-ib."""
    found = re.match(r"(?:\[[^\]]*\]|[^,\[\]])+(?=,|$)", nodelist)
    # A number keeps its leading zeros.
    name = re.sub(r"\[(\d+)[-,\d]*\]", r"\1", found[0]) if found else ""
    if not name or "[" in name:
        raise UsageError(f"'{nodelist}' names no host; write it like node[01-03],login")
    return name


def expand_task_counts(text: str) -> list[int]:
    """Expand Slurm's tasks per node: `2(x3),1` -> 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"'{part}' is not a number of tasks per node; Slurm writes it like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def visible_gpus(env: Mapping[str, str]) -> int:
    """Return the number of GPUs that a process with this environment sees on this host.

    CUDA_VISIBLE_DEVICES is not enough: container images set it on hosts without a GPU, and so does DeepSpeed's launcher
    for processes on a CPU. Called by launchers/torchrun.sh.
    """
    if is_cpu_requested(env):
        return 0
    listed = env.get("CUDA_VISIBLE_DEVICES")
    return len(visible_devices(listed, count_gpus(), list_gpu_uuids(listed)))


def is_cpu_requested(env: Mapping[str, str]) -> bool:
    """Return True if the environment hides every GPU."""
    listed = env.get("CUDA_VISIBLE_DEVICES", "all").strip()
    return env.get("DS_ACCELERATOR") == "cpu" or listed in ("", "-1", "NoDevFiles", "none", "void")


def visible_devices(cuda_visible_devices: str | None, gpu_count: int, uuids: Sequence[str] = ()) -> list[str]:
    """Return the devices that CUDA finds in CUDA_VISIBLE_DEVICES, by index or UUID as they are written there.

    As in CUDA, the first entry that is not a device ends the list, or one of another kind than the first, and a device
    that is listed twice empties it. A UUID may be cut where it stays unique. Of MIG slices (MIG-...) a process sees the
    first alone (NVIDIA Multi-Instance GPU User Guide, "CUDA Device Enumeration").

    `uuids`: those of `list_gpu_uuids`, by index; without them each UUID of a GPU is taken for a device.
    """
    if cuda_visible_devices is None:
        return [str(index) for index in range(gpu_count)]
    entries = [entry.strip() for entry in cuda_visible_devices.split(",")]
    if not gpu_count:
        return []
    if entries[0].startswith("MIG-"):
        return entries[:1]
    devices: dict[str, str] = {}
    """Index, or UUID where the indices are not known -> name for CUDA_VISIBLE_DEVICES."""
    for entry in entries:
        if entries[0].startswith("GPU-"):
            device, name = find_gpu(entry, uuids), entry
        else:
            device = name = _read_index(entry, gpu_count)
        if not device:
            break
        if device in devices:
            return []
        devices[device] = name
    return [*devices.values()]


def find_gpu(uuid: str, uuids: Sequence[str]) -> str:
    """Return the index of the GPU with this UUID, which may be cut; the UUID itself without `uuids`; else nothing."""
    if not uuid.startswith("GPU-"):
        return ""
    if not uuids:
        return uuid
    indices = [index for index, known in enumerate(uuids) if known.startswith(uuid)]
    return str(indices[0]) if len(indices) == 1 else ""


def _read_index(entry: str, gpu_count: int) -> str:
    """Return the index that an entry begins with, as strtoul of the C library reads it; nothing if there is no such GPU."""
    digits = re.match(r"\+?(\d+)", entry)
    return str(int(digits[1])) if digits and int(digits[1]) < gpu_count else ""


def list_gpu_uuids(cuda_visible_devices: str | None) -> list[str]:
    """Return the UUIDs of this host's GPUs by index, where CUDA_VISIBLE_DEVICES has UUIDs; empty if they are not known."""
    if not (cuda_visible_devices or "").strip().startswith("GPU-"):
        return []  # nobody asks for them
    return re.findall(r"^GPU \d+:.*\(UUID: (GPU-[^)]+)\)", _run_nvidia_smi("-L") or "", re.MULTILINE)


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this host, visible or not."""
    listing = _run_nvidia_smi("-L")
    if listing is not None:
        return sum(line.startswith("GPU ") for line in listing.splitlines())
    # Without nvidia-smi, as in slim container images, by the device files.
    return sum(path.name[len("nvidia") :].isdecimal() for path in Path("/dev").glob("nvidia*"))


def gpus_support_bf16() -> bool | None:
    """Return True if every GPU of this host supports bf16 (compute capability 8.0 and up); None if unknown."""
    capabilities = list_gpu_capabilities()
    return min(capabilities) >= (8, 0) if capabilities else None


def list_gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of this host's GPUs, as (7, 5); empty where they are not known."""
    listing = _run_nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")
    rows = re.findall(r"^\s*(\d+)\.(\d+)\s*$", listing or "", re.MULTILINE)
    return [(int(major), int(minor)) for major, minor in rows]


def _run_nvidia_smi(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
