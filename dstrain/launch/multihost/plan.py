"""A launch on several hosts as a value: who runs where, and the command lines that start it."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from dstrain.config.schema import LaunchConfig
from dstrain.errors import Fault, UsageError
from dstrain.launch.command import Launch, LaunchOptions, check_launcher, check_port, prepare_launch
from dstrain.launch.multihost.env import environment_files, travelling
from dstrain.launch.multihost.hostfile import Host, chosen_hosts, read_hostfile
from dstrain.launch.multihost.probe import interface_towards
from dstrain.launch.threads import cores_here, thread_environment
from dstrain.launch.topology import gpus_present, wants_cpu
from dstrain.launch.worker import LAUNCH

PORT = 29500
"""Where the ranks meet when every host was given its own command and none says a port."""
RANK = "dstrain.launch.multihost.rank_main"
_TOOLS = {"deepspeed": ("pdsh", "pdsh"), "openmpi": ("mpirun", "openmpi-bin")}


@dataclass(frozen=True, kw_only=True)
class HostsLaunch:
    """All that is known of it before a host was asked."""

    hosts: tuple[Host, ...]
    options: LaunchOptions
    arguments: tuple[str, ...]
    """Of `dstrain`, for every rank."""
    environment: Mapping[str, str]
    """For every rank."""
    cpu: bool
    """Whether GPUs are hidden on purpose."""
    silence: float
    """Seconds after which a host that says nothing is given up."""

    @property
    def processes(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    @property
    def ranks(self) -> range:
        return range(self.processes)

    def ranks_of(self, index: int) -> range:
        """Those of the host with this place in the list."""
        ends = list(accumulate(len(host.slots) for host in self.hosts))
        return range(ends[index] - len(self.hosts[index].slots), ends[index])


@dataclass(frozen=True)
class Master:
    """Where the ranks meet."""

    address: str
    port: int | str


def plan_launch(
    options: LaunchOptions, arguments: list[str], env: Mapping[str, str], config: LaunchConfig
) -> Launch | HostsLaunch:
    """The launch of `dstrain ARGUMENTS` on this machine or on the hosts of a hostfile. Raises UsageError."""
    check_launcher(options)
    if options.hostfile is None:
        return prepare_launch(options, arguments, _with_own(env, config))
    hosts = chosen_hosts(
        read_hostfile(options.hostfile), options.include, options.exclude, options.num_nodes, options.num_gpus
    )
    if options.no_ssh:
        return _own_share(options, arguments, _with_own(env, config), hosts)
    if options.node_rank is not None:
        raise UsageError(f"--node-rank {options.node_rank}: only with --no-ssh is each host given its own command")
    check_tools(options.launcher)
    return HostsLaunch(
        hosts=tuple(hosts),
        options=options,
        arguments=tuple(arguments),
        environment=travelling(env, config.env, environment_files(env)),
        cpu=wants_cpu(env),
        silence=config.silence_seconds,
    )


def crowded(launch: Launch | HostsLaunch) -> str:
    """A warning where this machine starts more processes on its CPU than it has cores; empty where all is well."""
    if isinstance(launch, HostsLaunch) or not launch.cpu:
        return ""
    return more_than_cores(len(launch.ranks), "this machine", cores_here())


def more_than_cores(processes: int, where: str, cores: int) -> str:
    if processes <= cores:
        return ""
    return (
        f"{processes} processes are started on {where}, which has {cores} CPU cores for them: they take turns, "
        f"and need the memory of {processes}; ask for {cores} or fewer"
    )


def check_tools(launcher: str) -> None:
    """Raise UsageError where a program is missing that reaches hosts."""
    tool, package = _TOOLS.get(launcher, ("ssh", "openssh-client"))
    for name, source in (("ssh", "openssh-client"), (tool, package)):
        if shutil.which(name) is None:
            raise UsageError(
                f"--launcher {launcher}: {name} is not installed here; install it (apt install {source})"
                + ("" if name == "ssh" else ", or add --launcher ssh, which needs ssh alone")
            )


def _with_own(env: Mapping[str, str], config: LaunchConfig) -> dict[str, str]:
    return {**env, **travelling({}, [entry for entry in config.env if "=" in entry], ())}


def _own_share(options: LaunchOptions, arguments: list[str], env: Mapping[str, str], hosts: Sequence[Host]) -> Launch:
    """What this host runs where every host was given its own command."""
    if options.node_rank is None or not 0 <= options.node_rank < len(hosts):
        raise UsageError(
            f"--no-ssh: this host's place among the {len(hosts)} hosts is not said; "
            f"add --node-rank K, from 0 on {hosts[0].name} to {len(hosts) - 1} on {hosts[-1].name}"
        )
    if options.launcher in ("openmpi", "ssh"):
        raise UsageError(f"--no-ssh: {options.launcher} starts over ssh; use deepspeed or torchrun")
    port = options.master_port or PORT
    if options.node_rank == 0:
        check_port(port)
    master, here = Master(options.master_addr or hosts[0].name, port), hosts[options.node_rank]
    cpu = wants_cpu(env) or not gpus_present()
    launch = HostsLaunch(hosts=tuple(hosts), options=options, arguments=(), environment={}, cpu=cpu, silence=0.0)
    argv = node_command(launch, options.node_rank, master, ["dstrain.cli", *arguments])
    environment = thread_environment(env, len(here.slots), cores_here()) | node_environment(launch, options.node_rank)
    if interface := interface_towards(master.address):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return Launch(argv, environment, launch.processes, here=launch.ranks_of(options.node_rank))


def node_command(launch: HostsLaunch, index: int, master: Master, module: list[str]) -> list[str]:
    """What starts the ranks of one host there: DeepSpeed's inner launcher, or torchrun."""
    host = launch.hosts[index]
    if launch.options.launcher == "torchrun":
        nodes = ["--nnodes", str(len(launch.hosts)), "--node-rank", str(index)]
        place = ["--nproc-per-node", str(len(host.slots))]
        meet = ["--master-addr", master.address, "--master-port", str(master.port)]
        return [sys.executable, "-m", "torch.distributed.run", *nodes, *place, *meet, "-m", *module]
    return [
        *(sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world_info(launch.hosts)}"),
        *(f"--node_rank={index}", f"--master_addr={master.address}", f"--master_port={master.port}"),
        *("--log_level=critical", "--no_local_rank", "--module", *module),
    ]


def node_environment(launch: HostsLaunch, index: int) -> dict[str, str]:
    """What `node_command` needs beside the environment of its host."""
    if launch.cpu:
        return {"DS_ACCELERATOR": "cpu"}
    if launch.options.launcher == "torchrun":
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.hosts[index].slots))}
    return {}


def world_info(hosts: Sequence[Host]) -> str:
    """DeepSpeed's list of hosts and slots, as its inner launcher takes it."""
    return base64.urlsafe_b64encode(json.dumps({host.name: list(host.slots) for host in hosts}).encode()).decode()


def check_starter(launch: HostsLaunch, run_dir: Path) -> None:
    """Raise UsageError for names that DeepSpeed's runner, pdsh or a shell behind them would change."""
    if launch.options.launcher not in ("deepspeed", "openmpi"):
        return
    if strange := re.search(r"[^\w@+=:,./-]", f"{run_dir}{sys.executable}"):
        raise UsageError(
            f"pdsh or mpirun and the shell behind it would change {strange[0]!r} in {run_dir}; "
            "choose a --run-dir without it, or add --launcher ssh"
        )
    if odd := next((host for host in launch.hosts if re.search(r"[@:%]", host.name)), None):
        mend = "give it a name in ~/.ssh/config and write that, or add --launcher ssh"
        raise UsageError(Fault(odd.where, f"DeepSpeed's runner cannot take the host {odd.name}", mend))


def starter_command(launch: HostsLaunch, hostfile: Path, master: Master, file: Path) -> list[str] | None:
    """DeepSpeed's runner over pdsh or mpirun, run on the launching host; None where the agents start the ranks."""
    if launch.options.launcher not in ("deepspeed", "openmpi"):
        return None
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh_check"]
    meet = ["--master_addr", master.address, "--master_port", str(master.port), "--force_multi", "--no_local_rank"]
    module = ["--module", RANK, str(file)]
    if launch.options.launcher == "openmpi":  # it takes no --include: the written hostfile holds what is left
        return [*runner, *meet, "--launcher", "openmpi", f"--launcher_args={_mpirun_options(launch, file)}", *module]
    include = "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in launch.hosts)
    return [*runner, "--include", include, *meet, "--launcher_args=-N", *module]


def _mpirun_options(launch: HostsLaunch, file: Path) -> str:
    """Ranks bound to no core, an ssh to each host from here, and daemons that an agent knows for ours."""
    agent = f"env {LAUNCH}={file} orted"
    settings = {
        "btl_tcp_if_include": "lo", "plm_rsh_no_tree_spawn": "1",
        "plm_rsh_args": shlex.join(ssh_options(launch.silence)), "orte_launch_agent": agent,
    }  # fmt: skip
    return shlex.join(["--bind-to", "none", *(word for pair in settings.items() for word in ("--mca", *pair))])


def starter_environment(launch: HostsLaunch, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of DeepSpeed's runner: it puts what it passes on into command lines, so it gets little to."""
    passed_on = re.compile("(PYTHON(?!PATH$)|MLFLOW|MV2|UCX|NCCL)")
    found = {name: value for name, value in env.items() if not passed_on.match(name)}
    found["DS_ENV_FILE"] = os.devnull
    found["PDSH_SSH_ARGS_APPEND"] = f"{env.get('PDSH_SSH_ARGS_APPEND', '')} {shlex.join(ssh_options(launch.silence))}"
    found["DS_ACCELERATOR"] = "cpu"  # of this process alone: it must not look for GPUs where it only starts others
    if launch.options.launcher == "openmpi" and os.geteuid() == 0:
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found


def agent_command(host: Host, silence: float, nonce: str, env: Mapping[str, str]) -> list[str]:
    """ssh to a host and an agent there."""
    return remote_command(host, ["dstrain.launch.multihost.agent", f"{silence:g}", nonce], silence, env)


def remote_command(host: Host, module: Sequence[str], silence: float, env: Mapping[str, str]) -> list[str]:
    """ssh to a host and a module of ours there. A whole path, as a login script may make aliases."""
    path = [f"PYTHONPATH={env['PYTHONPATH']}"] if env.get("PYTHONPATH") else []
    words = ["/usr/bin/env", *path, sys.executable, "-u", "-m", *module]
    return ["ssh", "-T", *ssh_options(silence), host.name, shlex.join(words)]


def ssh_options(silence: float) -> list[str]:
    """Never ask, do not wait for a host that is not there, and end when it is gone."""
    alive = max(1, round(silence / 3))
    pairs = ("BatchMode=yes", "ConnectTimeout=10", f"ServerAliveInterval={alive}", "ServerAliveCountMax=3")
    return [word for pair in pairs for word in ("-o", pair)]


def show_launch(launch: Launch | HostsLaunch, run_dir: Path) -> str:
    """The command lines, one per line, for people. What only the hosts can say stands in brackets."""
    if isinstance(launch, Launch):
        return shlex.join(launch.argv)
    check_starter(launch, run_dir)
    options, file = launch.options, run_dir / ".workers" / "launch-ID.json"
    address = options.master_addr or f"<address of {launch.hosts[0].name}>"
    master = Master(address, options.master_port or f"<free port on {launch.hosts[0].name}>")
    agents = [agent_command(host, launch.silence, "ID", os.environ) for host in launch.hosts]
    starter = starter_command(launch, file.with_name("hosts-ID"), master, file)
    nodes = [node_command(launch, index, master, [RANK, str(file)]) for index in range(len(launch.hosts))]
    return "\n".join(shlex.join(words) for words in (*agents, *(nodes if starter is None else [starter])))
