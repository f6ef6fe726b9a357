"""The command lines that start the workers, as values that `--dry-run` can print."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from dstrain.errors import UsageError
from dstrain.launch.threads import count_available_cores, thread_environment
from dstrain.launch.topology import count_gpus, is_cpu_requested, visible_devices

PORT_FILE_ENV = "DSTRAIN_PORT_FILE"
"""Path of a file by which the ranks of one host tell each other the port that rank 0 took when it listened."""
LAUNCHERS = ("deepspeed", "openmpi", "ssh", "torchrun", "slurm")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What the launch options of the command line said. None or empty: not given."""

    num_gpus: int | None = None
    """Processes per host, one per GPU; on a CPU just processes. Default: all visible GPUs, or one process."""
    num_nodes: int | None = None
    """Hosts to take from the top of the hostfile."""
    hostfile: str | None = None
    """File of `host slots=8` lines."""
    include: str = ""
    """GPUs to run on, as DeepSpeed writes them: localhost:0,2, or host1@host2:0,2 of a hostfile"""
    exclude: str = ""
    """GPUs to leave alone: localhost:1"""
    node_rank: int | None = None
    """This host's place among the hosts, from 0."""
    master_addr: str | None = None
    """Address of rank 0's host."""
    master_port: int | None = None
    """Port where the ranks meet. Default: a free one; with no_ssh 29500."""
    no_ssh: bool = False
    """Every host was given its own command, so none is reached over ssh."""
    launcher: str = "deepspeed"
    """deepspeed (over pdsh, where there is a hostfile), openmpi, ssh, torchrun or slurm."""


@dataclass(frozen=True)
class LocalLaunch:
    """All that `supervise` needs to start the workers."""

    argv: list[str]
    environment: dict[str, str]
    world_size: int
    """Of the whole run."""
    devices: tuple[str, ...] = ()
    """The GPUs, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    local_ranks: range | None = None
    """Ranks that run on this machine; None for all."""
    allow_any_port: bool = False
    """Whether rank 0 may listen where it likes."""

    @property
    def ranks(self) -> range:
        return range(self.world_size) if self.local_ranks is None else self.local_ranks

    @property
    def use_cpu(self) -> bool:
        """Whether no GPU is used."""
        return self.environment.get("DS_ACCELERATOR") == "cpu"


def plan_local_launch(options: LaunchOptions, arguments: list[str], env: Mapping[str, str]) -> LocalLaunch:
    """The launch of `dstrain ARGUMENTS` on this machine alone. Raises UsageError where the options do not fit it."""
    present = 0 if is_cpu_requested(env) else count_gpus()
    devices = select_devices(options, env, present)
    processes = len(devices) or options.num_gpus or 1
    if processes > 1:
        check_loopback()
    port = free_port() if options.master_port is None else options.master_port
    if options.master_port is not None:
        check_port(port)
    chosen = replace(options, include=f"localhost:{','.join(devices)}" if _needs_include(devices) else "", exclude="")
    argv = launch_command(chosen, arguments, processes, port)
    any_port = options.master_port is None and options.launcher == "deepspeed"  # torchrun meets by itself
    environment = launch_environment(options, env, devices, processes)
    return LocalLaunch(argv, environment, processes, tuple(devices), allow_any_port=any_port)


def launch_command(options: LaunchOptions, arguments: list[str], num_processes: int, port: int) -> list[str]:
    """The argv that runs `dstrain ARGUMENTS` in `gpus` processes here, under DeepSpeed's launcher or torchrun."""
    if options.launcher == "torchrun":
        place = ["--nproc-per-node", str(num_processes), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [sys.executable, "-m", "torch.distributed.run", *place, "-m", "dstrain.cli", *arguments]
    # DeepSpeed takes /job/hostfile where none is named, and runs here where the one named is no plain file.
    # At a lower log level it would warn of just that, and repeat the command of a rank that has said why it ended.
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "critical", "--hostfile", "/dev/null"]
    if options.include:
        command += ["--include", options.include]
    elif options.exclude:
        command += ["--exclude", options.exclude]
    else:
        command += ["--num_gpus", str(num_processes)]
    return [*command, "--master_port", str(port), "--module", "dstrain.cli", *arguments]


def launch_environment(
    options: LaunchOptions, env: Mapping[str, str], devices: list[str], num_processes: int
) -> dict[str, str]:
    """The environment for the launcher: threads, and which devices it may see."""
    launched = thread_environment(env, num_processes, count_available_cores())
    if not devices:
        return {**launched, "DS_ACCELERATOR": "cpu"}  # else DeepSpeed looks for one, and warns that it found none
    if options.launcher == "torchrun":
        return {**launched, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    # DeepSpeed's launcher drops CUDA_VISIBLE_DEVICES where GPUs are chosen by option; the option says it all.
    launched.pop("CUDA_VISIBLE_DEVICES", None)
    return launched


def select_devices(options: LaunchOptions, env: Mapping[str, str], gpu_count: int) -> list[str]:
    """The GPUs to run on, one process each; none on a CPU. `present`: GPUs of this machine, 0 to use none."""
    if options.num_gpus is not None and options.num_gpus < 1:
        raise UsageError(f"--num-gpus {options.num_gpus} starts no process; give 1 or more")
    if (options.include or options.exclude) and options.num_gpus is not None:
        raise UsageError("--num-gpus cannot stand beside --include or --exclude; they say how many already")
    if options.include and options.exclude:
        raise UsageError("--include and --exclude cannot stand together; give one of them")
    if options.include or options.exclude:
        return _filter_devices(options, gpu_count)
    listed = env.get("CUDA_VISIBLE_DEVICES")
    devices = visible_devices(listed, gpu_count)
    if gpu_count and not devices:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={listed} names none of the {gpu_count} GPUs here; "
            "name one that nvidia-smi -L lists, or set it to nothing to run on the CPU"
        )
    if options.num_gpus is None or not gpu_count:
        return _check_device_names(devices, options.launcher)
    if options.num_gpus > len(devices):
        raise UsageError(
            f"--num-gpus {options.num_gpus} asks for more than the {len(devices)} visible GPUs; "
            "ask for fewer, or widen CUDA_VISIBLE_DEVICES; CUDA_VISIBLE_DEVICES= (empty) runs on the CPU"
        )
    return _check_device_names(devices[: options.num_gpus], options.launcher)


def _filter_devices(options: LaunchOptions, gpu_count: int) -> list[str]:
    """--include and --exclude name GPUs of the machine, as in DeepSpeed, whatever CUDA_VISIBLE_DEVICES says."""
    name, text = ("--include", options.include) if options.include else ("--exclude", options.exclude)
    host, _, slots = text.partition(":")
    numbers = slots.split(",") if slots else [str(index) for index in range(gpu_count)]
    if host != "localhost" or not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{name} '{text}' does not name GPUs of this machine; write it like localhost:0,2")
    absent = sorted({int(number) for number in numbers if int(number) >= gpu_count})
    if absent or not gpu_count:
        raise UsageError(
            f"{name} '{text}' names GPU {absent[0] if absent else 0}, but there are {gpu_count} here; see nvidia-smi -L"
        )
    named = {int(number) for number in numbers}
    left = named if options.include else set(range(gpu_count)) - named
    if not left:
        raise UsageError(f"{name} '{text}' leaves no GPU to run on; leave at least one")
    return [str(index) for index in sorted(left)]


def _check_device_names(devices: list[str], launcher: str) -> list[str]:
    named = [device for device in devices if not device.isdecimal()]
    if named and launcher == "deepspeed":
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES names {named[0]}, and DeepSpeed's launcher knows GPUs by number only; "
            "write numbers as nvidia-smi -L lists them, or add --launcher torchrun"
        )
    return devices


def _needs_include(devices: list[str]) -> bool:
    """Whether `--num_gpus N`, which means the first N of the machine, would be other GPUs than these."""
    return devices != [str(index) for index in range(len(devices))]


def check_launcher(options: LaunchOptions) -> None:
    """Raise UsageError for launchers that do not exist, or need a hostfile."""
    if options.launcher not in LAUNCHERS:
        raise UsageError(f"--launcher {options.launcher} is unknown; choose one of {', '.join(LAUNCHERS)}")
    if options.launcher == "slurm":
        raise UsageError("--launcher slurm is not there yet; today use `sbatch launchers/slurm.sbatch RECIPE`")
    given = {
        "--launcher openmpi": options.launcher == "openmpi",
        "--launcher ssh": options.launcher == "ssh",
        "--num-nodes": options.num_nodes not in (None, 1),
        "--node-rank": options.node_rank not in (None, 0),
        "--master-addr": options.master_addr not in (None, "127.0.0.1", "localhost"),
        "--no-ssh": options.no_ssh,
    }
    if options.hostfile is None and (names := [name for name, is_given in given.items() if is_given]):
        raise UsageError(
            f"{', '.join(names)}: of several hosts only --hostfile says which; give one, see launchers/hostfile.example"
        )


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_loopback() -> None:
    """Raise UsageError where processes of this host cannot reach each other: they would try for timeout_minutes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        problem = f"several processes meet on 127.0.0.1, which does not answer ({error.strerror or error})"
        raise UsageError(
            f"{problem}; bring loopback up (`ip link set lo up`), or start one with --num-gpus 1"
        ) from None


def check_port(port: int) -> None:
    """Raise UsageError where the port is taken, naming who holds it."""
    if fault := find_port_fault(port):
        raise UsageError(fault)


def find_port_fault(port: int) -> str:
    """Why nothing can listen there, and what to do; empty where it can."""
    if not 0 < port < 65536:
        return f"--master-port {port} is no port; give one from 1024 to 65535, or leave it out"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            return f"--master-port {port} may not be used by this user; give one from 1024 to 65535"
        except OSError:
            held = f"is taken{describe_port_owner(port)}"
            return f"--master-port {port} {held}; leave the option out for a free port, or end that process"
    return ""


def describe_port_owner(port: int) -> str:
    """` by python (pid 4711)`, or nothing where the holder is not ours to see."""
    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid}
    except psutil.Error:
        return ""
    for pid in sorted(pids):
        try:
            return f" by {psutil.Process(pid).name()} (pid {pid})"
        except psutil.Error:
            continue
    return ""
