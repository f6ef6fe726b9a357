"""A launch on several hosts: planned from a hostfile, checked before it starts."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.config.schema import LaunchConfig
from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.errors import Fault, UsageError
from dstrain.launch.command import (
    PORT_FILE_ENV,
    LaunchOptions,
    LocalLaunch,
    check_launcher,
    check_port,
    host_environment,
    plan_local_launch,
)
from dstrain.launch.multihost.agent_client import AgentClient, request, request_replies
from dstrain.launch.multihost.hostfile import Host, read_hostfile, select_hosts
from dstrain.launch.multihost.probe import find_route_interface, find_source_diff, hash_source_files, iter_version_diffs
from dstrain.launch.spawn import rank_command
from dstrain.launch.topology import count_gpus, is_cpu_requested
from dstrain.launch.worker import AGENT_ENV, SUPERVISOR_ENV, get_workers_dir
from dstrain.process_setup import count_available_cores, log_stderr

DEFAULT_MASTER_PORT = 29500
"""Rendezvous port with --no-ssh, if --master-port is not given."""


AGENT_MODULE = "dstrain.launch.multihost.agent"


@dataclass(frozen=True, kw_only=True)
class MultiHostLaunch:
    """Hosts, arguments and environment of a launch, before any host is contacted."""

    hosts: tuple[Host, ...]
    options: LaunchOptions
    arguments: tuple[str, ...]
    """Arguments of `dstrain`, for every rank."""
    environment: Mapping[str, str]
    """Environment variables for every rank."""
    use_cpu: bool
    """True if the environment hides every GPU."""
    heartbeat_timeout: float
    """Seconds without a message after which a host counts as lost."""

    @property
    def world_size(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    def ranks_of(self, host_index: int) -> range:
        """Return the ranks of the host with this index."""
        ends = list(accumulate(len(host.slots) for host in self.hosts))
        return range(ends[host_index] - len(self.hosts[host_index].slots), ends[host_index])


@dataclass(frozen=True)
class MasterEndpoint:
    """Address and port of the rendezvous."""

    address: str
    port: int


def plan_launch(
    options: LaunchOptions, arguments: list[str], env: Mapping[str, str], config: LaunchConfig
) -> LocalLaunch | MultiHostLaunch:
    """Plan a launch of `dstrain ARGUMENTS` on this host or on those of a hostfile.

    Raises UsageError.
    """
    check_launcher(options)
    if options.hostfile is None:
        return plan_local_launch(options, arguments, _add_launch_env(env, config))
    hosts = select_hosts(
        read_hostfile(options.hostfile), options.include, options.exclude, options.num_nodes, options.num_gpus
    )
    if options.no_ssh:
        return _plan_this_host(options, arguments, _add_launch_env(env, config), hosts)
    if options.node_rank is not None:
        raise UsageError(f"--node-rank {options.node_rank}: works only with --no-ssh; remove it, or add --no-ssh")
    if shutil.which("ssh") is None:
        raise UsageError("--hostfile: ssh is not installed here; install it (apt install openssh-client)")
    return MultiHostLaunch(
        hosts=tuple(hosts),
        options=options,
        arguments=tuple(arguments),
        environment={
            RANK_KEY_ENV: secrets.token_hex(16),
            **build_remote_env(env, config.env, list_deepspeed_env_files(env)),
        },
        use_cpu=is_cpu_requested(env),
        heartbeat_timeout=config.heartbeat_timeout_seconds,
    )


def cpu_overload_warning(launch: LocalLaunch | MultiHostLaunch) -> str:
    """Return a warning if this host starts more CPU processes than it has cores, else ''."""
    if isinstance(launch, MultiHostLaunch) or not launch.use_cpu:
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


def _add_launch_env(env: Mapping[str, str], config: LaunchConfig) -> dict[str, str]:
    return {**env, **build_remote_env({}, [entry for entry in config.env if "=" in entry], ())}


def _plan_this_host(
    options: LaunchOptions, arguments: list[str], env: Mapping[str, str], hosts: Sequence[Host]
) -> LocalLaunch:
    """Return this host's part of a launch with --no-ssh. Raises UsageError."""
    if options.node_rank is None or not 0 <= options.node_rank < len(hosts):
        given = options.node_rank
        what = "is missing" if given is None else f"cannot be {given} (--node-rank {given})"
        raise UsageError(
            f"--no-ssh: this host's index among the {len(hosts)} hosts {what}; "
            f"add --node-rank K, from 0 on {hosts[0].name} to {len(hosts) - 1} on {hosts[-1].name}"
        )
    port = options.master_port or DEFAULT_MASTER_PORT
    if options.node_rank == 0:
        check_port(port)
    here, address = hosts[options.node_rank], options.master_addr or hosts[0].name
    use_cpu = is_cpu_requested(env) or not count_gpus()
    environment = host_environment(env, [] if use_cpu else [*map(str, here.slots)], len(here.slots))
    if interface := find_route_interface(address):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    sizes = [len(host.slots) for host in hosts]
    first = sum(sizes[: options.node_rank])
    return LocalLaunch(
        tuple(arguments), environment, sum(sizes), port, master_addr=address,
        local_ranks=range(first, first + len(here.slots)),
    )  # fmt: skip


def agent_command(host: Host, heartbeat_timeout: float, nonce: str, env: Mapping[str, str]) -> list[str]:
    """Return the command that starts an agent on a host over ssh."""
    return remote_command(host, [AGENT_MODULE, f"{heartbeat_timeout:g}", nonce], heartbeat_timeout, env)


def remote_command(host: Host, module: Sequence[str], heartbeat_timeout: float, env: Mapping[str, str]) -> list[str]:
    """Return the command that runs a module of dstrain on a host over ssh.

    Programs are absolute paths: a login script may define aliases.
    """
    path = [f"PYTHONPATH={env['PYTHONPATH']}"] if env.get("PYTHONPATH") else []
    # -u: a message must not wait in a buffer.
    words = ["/usr/bin/env", *path, sys.executable, "-u", "-m", *module]
    return ["ssh", "-T", *ssh_options(heartbeat_timeout), host.name, shlex.join(words)]


def ssh_options(heartbeat_timeout: float) -> list[str]:
    """Return ssh options: no prompts, a short connection timeout, an end when the host is lost, and error messages.

    A configuration with LogLevel QUIET would hide why a host cannot be reached.
    """
    # Three missed answers end the session, after about the heartbeat timeout.
    alive = max(1, round(heartbeat_timeout / 3))
    pairs = ("BatchMode=yes", "ConnectTimeout=10", f"ServerAliveInterval={alive}", "ServerAliveCountMax=3")
    return [word for pair in (*pairs, "LogLevel=INFO") for word in ("-o", pair)]


def show_launch(launch: LocalLaunch | MultiHostLaunch) -> str:
    """Return the command lines for --dry-run: of the agents, and of each rank. What only the hosts know is in angle
    brackets.
    """
    lines = []
    if isinstance(launch, LocalLaunch):
        port = "<free port>" if launch.allow_any_port else launch.master_port
        arguments, address, hosts = launch.arguments, launch.master_addr, [launch.ranks]
    else:
        first = launch.hosts[0].name
        port, address = (
            launch.options.master_port or f"<free port on {first}>",
            launch.options.master_addr or f"<address of {first}>",
        )
        arguments, hosts = launch.arguments, [launch.ranks_of(index) for index in range(len(launch.hosts))]
        lines = [shlex.join(agent_command(host, launch.heartbeat_timeout, "ID", os.environ)) for host in launch.hosts]
    for ranks in hosts:
        place = f"RANK={_show_range(ranks)} LOCAL_RANK={_show_range(range(len(ranks)))} WORLD_SIZE={launch.world_size}"
        lines.append(
            f"{place} LOCAL_WORLD_SIZE={len(ranks)} MASTER_ADDR={address} MASTER_PORT={port} "
            f"{shlex.join(rank_command(arguments))}"
        )
    return "\n".join(lines)


def _show_range(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"<{numbers[0]} to {numbers[-1]}>"


FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "DSTRAIN_", "DS_ACCELERATOR"),
    *("TRITON_", "TOKENIZERS_", "PYTHON", "UCX_", "MLFLOW_"),
)
"""Prefixes of forwarded names."""
HOST_ONLY_VARIABLES = ("CUDA_VISIBLE_DEVICES", SUPERVISOR_ENV, AGENT_ENV, PORT_FILE_ENV)
"""Variables that are valid on one host only."""


def build_remote_env(env: Mapping[str, str], entries: Sequence[str], env_files: Sequence[Path]) -> dict[str, str]:
    """Return the environment for the ranks: forwarded names, then DeepSpeed's files, then
    `launch.env`.

    `entries` of launch.env are NAME or NAME=value; `env_files` are paths of `.deepspeed_env`, which
    may not exist. Raises UsageError.
    """
    found = {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in HOST_ONLY_VARIABLES
    }
    for path in env_files:
        # Later sources win: the recipe is the most specific.
        found |= read_env_file(path, env)
    for entry in entries:
        name, given, value = entry.partition("=")
        if not given and name not in env:
            raise UsageError(f"launch.env: {name} is not set here; set it, write {name}=value, or remove it")
        found[name] = value if given else env[name]
    return found


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
    found, faults = {}, []
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
        found[match[1]] = re.sub(r"\$\{?(\w+)\}?", lambda name: env.get(name[1], name[0]), value)
    if faults:
        raise UsageError(faults)
    return found


def probe_hosts(launch: MultiHostLaunch, clients: list[AgentClient], run_dir: Path) -> None:
    """Request every host's software, GPUs and addresses.

    Raises UsageError with the faults of all hosts.
    """
    request_host_info(clients, get_workers_dir(run_dir), launch.use_cpu)
    if faults := [client.connection_fault() for client in clients if not client.host_info]:
        raise UsageError(faults)
    for client in clients:
        client.use_heartbeat_timeout()
    if faults := list(iter_host_faults(clients, run_dir)):
        raise UsageError(faults)
    if not any(client.host_info["gpus"] for client in clients):
        for client in clients:
            if line := format_cpu_overload(len(client.host.slots), client.host.name, client.host_info["cores"]):
                log_stderr(f"warning: {line}")


def request_host_info(clients: list[AgentClient], shared_dir: Path, use_cpu: bool) -> None:
    """Fill in `host_info` of the hosts that answer. They look for a file in `shared_dir`, which is created."""
    # A new name each time: an NFS client may remember that an earlier one was absent.
    token = shared_dir / f"seen-{secrets.token_hex(8)}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_bytes(b"")
    hello = {"token": str(token), "cwd": os.getcwd(), "cpu": use_cpu}
    try:
        for client, info in request_replies(clients, lambda _: {"hello": hello}, "host_info").items():
            client.host_info = info
    finally:
        token.unlink(missing_ok=True)


def iter_host_faults(clients: list[AgentClient], run_dir: Path) -> Iterator[Fault]:
    """Yield what keeps the hosts that have answered from a common run."""
    first: dict[str, str] = {}
    with_gpus = any(client.host_info["gpus"] for client in clients)
    for client in clients:
        host, host_info, where = client.host, client.host_info, f"{client.host.location} {client.host.name}"
        # Two names of one machine would start two agents that kill each other's ranks.
        if (other := first.setdefault(host_info["machine"], host.name)) and other != host.name:
            yield Fault(where, f"is the same machine as {other}", "name it once, with all its slots")
        if not host_info["sees"]:
            yield Fault(
                where,
                f"does not see {run_dir}",
                "mount it there, or use a folder that all hosts share (--run-dir; TMPDIR for other commands than train)",
            )
        if not host_info["has_cwd"]:
            yield Fault(where, f"has no folder {Path.cwd()}", "start from a folder that all hosts have")
        yield from (Fault(where, problem, fix) for problem, fix in _iter_version_faults(host_info, clients[0]))
        if with_gpus and host_info["gpus"] <= max(host.slots):
            fix = "write as many slots as it has GPUs, or select with --include"
            yield Fault(where, f"has {host_info['gpus']} GPUs, but slot {max(host.slots)} is requested", fix)


def _iter_version_faults(host_info: Mapping[str, Any], first_client: AgentClient) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each version that differs.

    dstrain is compared with this process, whose messages the agents read; the rest with the first
    host, since the ranks compute together.
    """
    versions = host_info["versions"]
    if versions["dstrain"] != __version__:
        yield (
            f"has dstrain {versions['dstrain']}, this host has {__version__}",
            "install the same version on every host",
        )
    for name, wanted, found in iter_version_diffs(first_client.host_info["versions"], versions):
        if name != "dstrain":
            yield f"has {name} {found}, {first_client.host.name} has {wanted}", f"install {name} {wanted} on every host"
    name, count = find_source_diff(hash_source_files(), host_info["digests"])
    if count and versions["dstrain"] == __version__:
        others = f" and {count - 1} more" if count > 1 else ""
        yield (
            f"has other code of dstrain {__version__} than this host: {name}{others}",
            "install the same build on every host, or share the folder",
        )


def choose_master(launch: MultiHostLaunch, clients: list[AgentClient]) -> MasterEndpoint:
    """Choose address and port on the first host, and check that the others reach it.

    Raises UsageError.
    """
    first, others = clients[0], clients[1:]
    address = (
        launch.options.master_addr or first.host_info["reached_at"] or next(iter(first.host_info["addresses"]), "")
    )
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; give one with --master-addr")
    endpoint = {"address": address or "127.0.0.1", "port": launch.options.master_port or 0}
    opening = request([first], lambda _: {"open": endpoint}, "opened")[first]
    if "fault" in opening:
        raise UsageError(f"{first.host.name}: {opening['fault']}")
    first.interface = opening["interface"] if others else ""
    port = opening["port"]
    replies = request(others, lambda _: {"reach": {"address": address, "port": port}}, "reachability")
    for client in others:
        client.interface = replies[client].get("interface", "")
    if faults := [
        Fault(
            f"{client.host.location} {client.host.name}",
            f"does not reach {first.host.name} at {address}, port {port} ({found['fault']})",
            "open the network between the hosts, or give an address that they reach with --master-addr",
        )
        for client, found in replies.items()
        if "fault" in found
    ]:
        raise UsageError(faults)
    return MasterEndpoint(address or "127.0.0.1", port)
