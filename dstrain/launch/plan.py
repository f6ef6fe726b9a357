"""Launch options, and the plan of a launch on this host or on those of a hostfile."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.config.schema import LaunchConfig
from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.errors import Fault, UsageError
from dstrain.host_limits import count_available_cores, thread_environment
from dstrain.launch.hostfile import Host, read_hostfile, select_hosts
from dstrain.launch.probe import check_loopback, check_port
from dstrain.launch.topology import count_gpus, is_cpu_requested, list_gpu_uuids, visible_devices
from dstrain.launch.worker import HOST_ONLY_VARIABLES

DEFAULT_MASTER_PORT = 29500
"""Rendezvous port with --no-ssh, if --master-port is not given."""
FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "DSTRAIN_", "DS_ACCELERATOR"),
    *("TRITON_", "TOKENIZERS_", "PYTHON", "UCX_", "MLFLOW_"),
)
"""Prefixes of the names of environment variables that other hosts get."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Launch options of the command line; None or empty if not given."""

    num_gpus: int | None = None
    """Processes per host, one per GPU; on a CPU the number of processes. Default: all visible GPUs, or one process."""
    num_nodes: int | None = None
    """Hosts to take from the top of the hostfile; nodes of a Slurm job."""
    hostfile: str | None = None
    """File of `host slots=8` lines."""
    include: str = ""
    """GPUs to run on, in DeepSpeed's form: localhost:0,2, or with a hostfile host1@host2:0,2."""
    exclude: str = ""
    """GPUs not to use: localhost:1."""
    node_rank: int | None = None
    """Index of this host in the hostfile, from 0."""
    master_addr: str | None = None
    """Address of rank 0's host."""
    master_port: int | None = None
    """Rendezvous port on rank 0's host. Default: a free one; with no_ssh 29500."""
    no_ssh: bool = False
    """The user starts the command on every host; none is reached over ssh."""
    launcher: str = "ssh"
    """ssh, for the hosts of a hostfile, or slurm: submit a job."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Ranks that one command starts, on this host or over ssh; and the ones of each such host there."""

    argv: Sequence[str]
    """Command of every rank."""
    environment: Mapping[str, str]
    """Environment variables of every rank."""
    world_size: int
    """Ranks of the whole run."""
    ranks: range
    """Ranks that this command starts: all, but with --no-ssh."""
    master_addr: str = "127.0.0.1"
    """Address of rank 0's host; empty until a host has told it."""
    master_port: int = 0
    """Rendezvous port on rank 0's host; 0 for a free one."""
    devices: tuple[str, ...] = ()
    """GPUs of this host as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""
    hosts: tuple[Host, ...] = ()
    """Hosts that are reached over ssh; empty for a launch on this host."""
    heartbeat_timeout: float = 0.0
    """Seconds without an answer after which such a host is lost, and after which its ranks end without this process."""

    @property
    def has_all_ranks(self) -> bool:
        """True if this command starts all ranks of the run."""
        return len(self.ranks) == self.world_size

    @property
    def use_cpu(self) -> bool:
        """True if no GPU is used, as far as this host knows."""
        return self.environment.get("DS_ACCELERATOR") == "cpu"

    def ranks_of(self, host_index: int) -> range:
        """Return the ranks of the host with this index."""
        end = sum(len(host.slots) for host in self.hosts[: host_index + 1])
        return range(end - len(self.hosts[host_index].slots), end)


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a rank of `dstrain ARGUMENTS`, which imports nothing from the working directory (-P)."""
    return [sys.executable, "-P", "-u", "-m", "dstrain.cli", *arguments]


def plan_local_launch(options: LaunchOptions, arguments: list[str], env: Mapping[str, str]) -> Launch:
    """Plan a launch of `dstrain ARGUMENTS` on this host only. Raises UsageError if the options do not fit it."""
    gpu_count = 0 if is_cpu_requested(env) else count_gpus()
    devices = select_devices(options, env, gpu_count)
    num_processes = len(devices) or options.num_gpus or 1
    # A single process connects to nothing.
    if num_processes > 1:
        check_loopback()
    if options.master_port is not None:
        check_port(options.master_port)
    return Launch(
        argv=rank_command(arguments), environment=host_environment(env, devices, num_processes),
        world_size=num_processes, ranks=range(num_processes), master_port=options.master_port or 0,
        devices=tuple(devices),
    )  # fmt: skip


def host_environment(env: Mapping[str, str], devices: Sequence[str], num_processes: int) -> dict[str, str]:
    """Return the environment of a host's ranks: number of threads, and visible devices."""
    shared = thread_environment(env, num_processes, count_available_cores())
    if not devices:
        return {**shared, "DS_ACCELERATOR": "cpu"}  # else DeepSpeed looks for a GPU, and warns that it found none
    return {**shared, "CUDA_VISIBLE_DEVICES": ",".join(devices)}


def select_devices(options: LaunchOptions, env: Mapping[str, str], gpu_count: int) -> list[str]:
    """Return the GPUs to run on, one process each; none on a CPU. Raises UsageError.

    `gpu_count` is the number of GPUs of this host, 0 to use none.
    """
    if options.num_gpus is not None and options.num_gpus < 1:
        raise UsageError(f"--num-gpus {options.num_gpus} starts no process; give 1 or more")
    if text := options.include or options.exclude:  # as in DeepSpeed, CUDA_VISIBLE_DEVICES is ignored
        if not gpu_count or text.partition(":")[0] != "localhost":
            name, fix = (
                "--include" if options.include else "--exclude",
                "write it like localhost:0,2 (see nvidia-smi -L)",
            )
            raise UsageError(f"{name} '{text}' does not name GPUs of this machine, which has {gpu_count}; {fix}")
        all_gpus = Host("localhost", tuple(range(gpu_count)), "this machine")
        (chosen,) = select_hosts([all_gpus], options.include, options.exclude, None, options.num_gpus)
        return [*map(str, chosen.slots)]
    listed = env.get("CUDA_VISIBLE_DEVICES")
    devices = visible_devices(listed, gpu_count, list_gpu_uuids(listed) if gpu_count else ())
    if gpu_count and not devices:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={listed} names none of the {gpu_count} GPUs here; "
            "name one that nvidia-smi -L lists, or set it to nothing to run on the CPU"
        )
    if options.num_gpus is None or not gpu_count:
        return devices
    if options.num_gpus > len(devices):
        raise UsageError(
            f"--num-gpus {options.num_gpus} asks for more than the {len(devices)} visible GPUs; "
            "ask for fewer, or add GPUs to CUDA_VISIBLE_DEVICES; CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"
        )
    return devices[: options.num_gpus]


def cpu_overload_warning(launch: Launch) -> str:
    """Return a warning if this host starts more CPU processes than it has cores, else ''."""
    if launch.hosts or not launch.use_cpu:
        return ""
    return format_cpu_overload(len(launch.ranks), "this machine", count_available_cores())


def format_cpu_overload(processes: int, host: str, cores: int) -> str:
    """Return a warning if there are more processes than cores, else ''."""
    if processes <= cores:
        return ""
    return (
        f"{processes} processes are started on {host}, which has {cores} CPU cores: they share the cores, "
        f"and each needs its own memory; use {cores} or fewer"
    )


def check_launcher(options: LaunchOptions) -> None:
    """Raise UsageError for Slurm, which runs only `dstrain train`, and for options that need a hostfile."""
    if options.launcher == "slurm":
        raise UsageError("--launcher slurm: works only with `dstrain train`; in an allocation start this with srun")
    given = {
        "--num-nodes": options.num_nodes not in (None, 1),
        "--node-rank": options.node_rank not in (None, 0),
        "--master-addr": options.master_addr not in (None, "127.0.0.1", "localhost"),
        "--no-ssh": options.no_ssh,
    }
    if options.hostfile is None and (names := [name for name, is_given in given.items() if is_given]):
        raise UsageError(
            f"{', '.join(names)}: runs on several hosts need --hostfile; give one, see launchers/hostfile.example"
        )


def plan_launch(options: LaunchOptions, arguments: list[str], env: Mapping[str, str], config: LaunchConfig) -> Launch:
    """Plan a launch of `dstrain ARGUMENTS` on this host or on those of a hostfile. Raises UsageError."""
    check_launcher(options)
    local_env = {**env, **dict(entry.split("=", 1) for entry in config.env if "=" in entry)}
    # The ranks of one command get a key of their own; with --no-ssh the user gives all commands the same one.
    own_key = {RANK_KEY_ENV: secrets.token_hex(16)}
    if options.hostfile is None:
        return plan_local_launch(options, arguments, local_env | own_key)
    hosts = select_hosts(
        read_hostfile(options.hostfile), options.include, options.exclude, options.num_nodes, options.num_gpus
    )
    if options.no_ssh:
        return _plan_this_host(options, arguments, local_env, hosts)
    if options.node_rank is not None:
        raise UsageError(f"--node-rank {options.node_rank}: works only with --no-ssh; remove it, or add --no-ssh")
    if shutil.which("ssh") is None:
        raise UsageError("--hostfile: ssh is not installed here; install it (apt install openssh-client)")
    world_size = sum(len(host.slots) for host in hosts)
    on_cpu = {"DS_ACCELERATOR": "cpu"} if is_cpu_requested(env) else {}
    return Launch(
        argv=rank_command(arguments),
        environment=own_key | build_remote_env(env, config.env, list_deepspeed_env_files(env)) | on_cpu,
        world_size=world_size,
        ranks=range(world_size),
        master_addr=options.master_addr or "",
        master_port=options.master_port or 0,
        hosts=tuple(hosts),
        heartbeat_timeout=config.heartbeat_timeout_seconds,
    )


def _plan_this_host(
    options: LaunchOptions, arguments: list[str], env: Mapping[str, str], hosts: Sequence[Host]
) -> Launch:
    """Return this host's part of a launch with --no-ssh. Raises UsageError."""
    if options.node_rank is None or not 0 <= options.node_rank < len(hosts):
        given = options.node_rank
        problem = "is missing" if given is None else f"cannot be {given} (--node-rank {given})"
        raise UsageError(
            f"--no-ssh: this host's index among the {len(hosts)} hosts {problem}; "
            f"add --node-rank K, from 0 on {hosts[0].name} to {len(hosts) - 1} on {hosts[-1].name}"
        )
    port = options.master_port or DEFAULT_MASTER_PORT
    if options.node_rank == 0:
        check_port(port)
    here, address = hosts[options.node_rank], options.master_addr or hosts[0].name
    use_cpu = is_cpu_requested(env) or not count_gpus()
    environment = host_environment(env, [] if use_cpu else [*map(str, here.slots)], len(here.slots))
    first = sum(len(host.slots) for host in hosts[: options.node_rank])
    return Launch(
        argv=rank_command(arguments), environment=environment, world_size=sum(len(host.slots) for host in hosts),
        ranks=range(first, first + len(here.slots)), master_addr=address, master_port=port,
    )  # fmt: skip


def build_remote_env(env: Mapping[str, str], entries: Sequence[str], env_files: Sequence[Path]) -> dict[str, str]:
    """Return the environment for the ranks: forwarded names, then DeepSpeed's files, then `launch.env`.

    `entries` of launch.env are NAME or NAME=value; `env_files` are paths of `.deepspeed_env`, which may not exist.
    Raises UsageError.
    """
    variables = {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in ("CUDA_VISIBLE_DEVICES", *HOST_ONLY_VARIABLES)
    }
    for path in env_files:
        # Later sources win: the recipe is the most specific.
        variables |= read_env_file(path, env)
    return variables | resolve_env_entries(entries, env)


def resolve_env_entries(entries: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `launch.env`: NAME=value, or NAME with the value here. Raises UsageError if it is not set."""
    variables = {}
    for entry in entries:
        name, given, value = entry.partition("=")
        if not given and name not in env:
            raise UsageError(f"launch.env: {name} is not set here; set it, write {name}=value, or remove it")
        variables[name] = value if given else env[name]
    return variables


def list_deepspeed_env_files(env: Mapping[str, str]) -> list[Path]:
    """Return the paths at which DeepSpeed looks for variables for all hosts."""
    name = env.get("DS_ENV_FILE", ".deepspeed_env")
    # Not Path.expanduser: it raises if the user has no home folder, as in a container with an
    # arbitrary user id.
    return [path / name for path in (Path(os.path.expanduser("~")), Path())]


def read_env_file(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Read NAME=value lines, with $NAME expanded; comments and blank lines are skipped.

    Empty if there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not valid UTF-8 (byte {error.start}); re-save the file as UTF-8") from None
    variables, faults = {}, []
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None:
            faults.append(Fault(f"{path}:{number}", "not NAME=value", "fix the line, or comment it out with #"))
            continue
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[match[1]] = re.sub(r"\$\{?(\w+)\}?", lambda name: env.get(name[1], name[0]), value)
    if faults:
        raise UsageError(faults)
    return variables
