"""Plan of a launch, on this host or on those of a hostfile, and what --dry-run shows of it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrain.config.schema import LaunchConfig
from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.errors import Fault, UsageError
from dstrain.launch.command import (
    Launch,
    LaunchOptions,
    check_launcher,
    check_port,
    host_environment,
    plan_local_launch,
    rank_command,
)
from dstrain.launch.hostfile import Host, read_hostfile, select_hosts
from dstrain.launch.hosts import host_command
from dstrain.launch.spawn import HOST_ONLY_VARIABLES
from dstrain.launch.topology import count_gpus, is_cpu_requested

DEFAULT_MASTER_PORT = 29500
"""Rendezvous port with --no-ssh, if --master-port is not given."""
FORWARDED_PREFIXES = (
    *("HF_", "WANDB_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "OMP_", "MKL_", "CUDA_", "DSTRAIN_", "DS_ACCELERATOR"),
    *("TRITON_", "TOKENIZERS_", "PYTHON", "UCX_", "MLFLOW_"),
)
"""Prefixes of the names of environment variables that other hosts get."""


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
    first = sum(len(host.slots) for host in hosts[: options.node_rank])
    return Launch(
        argv=rank_command(arguments), environment=environment, world_size=sum(len(host.slots) for host in hosts),
        ranks=range(first, first + len(here.slots)), master_addr=address, master_port=port,
    )  # fmt: skip


def show_launch(launch: Launch) -> str:
    """Return the command lines for --dry-run: of the ssh sessions, and of each rank. What only the hosts know is in angle
    brackets.
    """
    lines = [shlex.join(host_command(host, launch.heartbeat_timeout)) for host in launch.hosts]
    first = launch.hosts[0].name if launch.hosts else ""
    address = launch.master_addr or f"<address of {first}>"
    port = launch.master_port or f"<free port{f' on {first}' if first else ''}>"
    for ranks in [launch.ranks_of(index) for index in range(len(launch.hosts))] or [launch.ranks]:
        place = f"RANK={_show_range(ranks)} LOCAL_RANK={_show_range(range(len(ranks)))} WORLD_SIZE={launch.world_size}"
        lines.append(
            f"{place} LOCAL_WORLD_SIZE={len(ranks)} MASTER_ADDR={address} MASTER_PORT={port} {shlex.join(launch.argv)}"
        )
    return "\n".join(lines)


def _show_range(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"<{numbers[0]} to {numbers[-1]}>"


def build_remote_env(env: Mapping[str, str], entries: Sequence[str], env_files: Sequence[Path]) -> dict[str, str]:
    """Return the environment for the ranks: forwarded names, then DeepSpeed's files, then `launch.env`.

    `entries` of launch.env are NAME or NAME=value; `env_files` are paths of `.deepspeed_env`, which may not exist.
    Raises UsageError.
    """
    found = {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in ("CUDA_VISIBLE_DEVICES", *HOST_ONLY_VARIABLES)
    }
    for path in env_files:
        # Later sources win: the recipe is the most specific.
        found |= read_env_file(path, env)
    return found | resolve_env_entries(entries, env)


def resolve_env_entries(entries: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `launch.env`: NAME=value, or NAME with the value here. Raises UsageError if it is not set."""
    found = {}
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
