"""Launch options, a launch, and its plan on a single host."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from dstrain.errors import UsageError
from dstrain.host_memory import count_available_cores
from dstrain.launch.hostfile import Host, select_hosts
from dstrain.launch.processes import thread_environment
from dstrain.launch.topology import count_gpus, is_cpu_requested, list_gpu_uuids, visible_devices


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


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_loopback() -> None:
    """Raise UsageError if loopback does not work: the processes would try to connect for timeout_minutes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        problem = f"several processes meet on 127.0.0.1, which does not answer ({error.strerror or error})"
        raise UsageError(
            f"{problem}; bring loopback up (`ip link set lo up`), or start one with --num-gpus 1"
        ) from None


def check_port(port: int) -> None:
    """Raise UsageError, with the process that holds it, if no process can listen on the port."""
    if not 0 < port < 65536:
        raise UsageError(f"--master-port {port} is not a port; give one from 1024 to 65535, or leave it out")
    with socket.socket() as probe:
        # Without it, a port whose connection has just ended (TIME_WAIT) would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            fix = "give one from 1024 to 65535"
            raise UsageError(f"--master-port {port} may not be used by this user; {fix}") from None
        except OSError:
            problem = f"is taken{describe_port_owner(port)}"
            fix = "leave the option out for a free port, or end that process"
            raise UsageError(f"--master-port {port} {problem}; {fix}") from None


def describe_port_owner(port: int) -> str:
    """Return ` by python (pid 4711)`; '' if this user may not see the process."""
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
