"""A launch on Slurm: the job script of a run, and its submission with sbatch."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.config.schema import LaunchConfig, SlurmConfig
from dstrain.errors import UsageError, fix_for_os_error, one_line
from dstrain.files import atomic_write, make_folder
from dstrain.launch.plan import LaunchOptions, rank_command, resolve_env_entries
from dstrain.launch.topology import is_cpu_requested
from dstrain.process_setup import log_stderr
from dstrain.resources import find_resource_dir

SCRIPT_FILE = "slurm.sbatch"
"""Name of the job script in the run folder."""
_TIMEOUT_SECONDS = 120.0
"""Limit for an answer of sbatch and sinfo: the controller may be busy or down."""
OUTPUT_FILE = "logs/slurm-{job}.out"
"""Path in the run folder of what the job script and srun print."""

TEMPLATE_FILE = "job.sbatch"
"""Name of the job script in `launchers`, whose settings a launch replaces."""
_BEGIN, _END = "# ---- settings ----\n", "# ---- end of the settings ----\n"


@dataclass(frozen=True, kw_only=True)
class SlurmLaunch:
    """A job of one srun task per rank."""

    run_dir: Path
    arguments: tuple[str, ...]
    """Arguments of `dstrain`, for every rank."""
    environment: tuple[str, ...]
    """NAME=value for every rank."""
    config: SlurmConfig
    nodes: int
    tasks_per_node: int
    """Ranks per node, one per GPU."""
    cpus_per_task: int | None
    """None: Slurm's default."""
    use_cpu: bool
    """True if no GPU is requested."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def script(self) -> str:
        """The job script."""
        template = (find_resource_dir("launchers") / TEMPLATE_FILE).read_text(encoding="utf-8")
        head, _, rest = template.partition(_BEGIN)
        _, _, tail = rest.partition(_END)
        exports = [*self.environment, *(["DS_ACCELERATOR=cpu"] if self.use_cpu else [])]
        setup = ["set -e", *self.config.setup, "set +e"] if self.config.setup else []
        lines = [
            f"# Written by dstrain. To change the job, edit this file and run: sbatch {shlex.quote(str(self.run_dir / SCRIPT_FILE))}",
            *(f"#SBATCH --{name}={_quote_directive(name, value)}" for name, value in self._options()),
            f"RUN_DIR={shlex.quote(str(self.run_dir))}",
            f"COMMAND=({shlex.join(rank_command(self.arguments))})",
            *(f"export {_quote_value(entry)}" for entry in exports),
            *setup,
        ]
        settings = "\n".join(lines)
        return f"{head}{_BEGIN}{settings}\n{_END}{tail}"

    def _options(self) -> list[tuple[str, object]]:
        """Return (name, value) of options of sbatch, without those that depend on nothing."""
        found = {
            # The same for each job of this run folder, and for no other folder: see --dependency=singleton.
            "job-name": f"{self.run_dir.name}-{zlib.crc32(str(self.run_dir).encode()):08x}",
            "partition": self.config.partition,
            "account": self.config.account,
            "time": self.config.time,
            "nodes": self.nodes,
            "ntasks-per-node": self.tasks_per_node,
            "gpus-per-node": None if self.use_cpu else self.tasks_per_node,
            "cpus-per-task": self.cpus_per_task,
            "chdir": Path.cwd(),
            "output": f"{str(self.run_dir).replace('%', '%%')}/{OUTPUT_FILE.format(job='%j')}",
        }
        return [(name, value) for name, value in found.items() if value is not None]


def plan_slurm_launch(
    options: LaunchOptions, arguments: Sequence[str], env: Mapping[str, str], config: LaunchConfig, run_dir: Path
) -> SlurmLaunch:
    """Plan a job of `dstrain ARGUMENTS`, with what sinfo tells about the nodes where options are missing.

    Raises UsageError for options of other launchers, and if the number of GPUs is neither given nor known.
    """
    given = {
        "--hostfile": options.hostfile,
        "--include": options.include,
        "--exclude": options.exclude,
        "--node-rank": options.node_rank is not None,
        "--master-addr": options.master_addr,
        "--master-port": options.master_port is not None,
        "--no-ssh": options.no_ssh,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise UsageError(
            f"{', '.join(names)}: no option of --launcher slurm, which chooses hosts and port; remove it (sbatch reads "
            "SBATCH_* variables, such as SBATCH_EXCLUSIVE)"
        )
    for name, count in (("--num-nodes", options.num_nodes), ("--num-gpus", options.num_gpus)):
        if count is not None and count < 1:
            raise UsageError(f"{name} {count} starts no process; give 1 or more")
    resolve_env_entries(config.env, env)
    partition = env.get("SBATCH_PARTITION") or config.slurm.partition
    nodes = list_nodes(partition)
    gpu_nodes = [] if is_cpu_requested(env) else [node for node in nodes if node.gpus]
    use_cpu = is_cpu_requested(env) or bool(nodes and not gpu_nodes)
    if use_cpu and not is_cpu_requested(env):
        log_stderr("warning: sinfo lists no GPUs in the partition; the job runs on CPUs")
    if options.num_gpus is None and not use_cpu and not gpu_nodes:
        raise UsageError("--launcher slurm: sinfo does not tell the GPUs of a node here; give --num-gpus")
    tasks = options.num_gpus or min((node.gpus for node in gpu_nodes), default=1)
    # Of a node's cores, a GPU's share to each task; without GPUs all to the tasks.
    shares = [node.cpus // (node.gpus or tasks) for node in gpu_nodes or nodes]
    return SlurmLaunch(
        run_dir=run_dir,
        arguments=tuple(arguments),
        environment=tuple(entry for entry in config.env if "=" in entry),
        config=config.slurm,
        nodes=options.num_nodes or 1,
        tasks_per_node=tasks,
        cpus_per_task=max(1, min(shares)) if shares else None,
        use_cpu=use_cpu,
    )


@dataclass(frozen=True)
class Node:
    """What nodes of a partition have."""

    cpus: int
    gpus: int


def list_nodes(partition: str | None) -> list[Node]:
    """Return the kinds of nodes in a partition (None: the default one); none if sinfo does not tell."""
    command = ["sinfo", "--noheader", "--exact", "--format=%P %c %G"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    nodes = []
    # With SLURM_CLUSTERS there are other lines, such as CLUSTER: NAME.
    for name, cpus, gres in re.findall(r"^(\S+) +(\d+)\+? (.+)$", done.stdout, re.MULTILINE):
        if name.removesuffix("*") in (partition or "").split(",") or (partition is None and name.endswith("*")):
            nodes.append(Node(int(cpus), sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres)))))
    return nodes


def submit(launch: SlurmLaunch) -> str:
    """Write the job script into the run folder and submit it. Returns the job's id.

    Raises UsageError if there is no sbatch or it refuses the job; an earlier job script then stays.
    """
    if shutil.which("sbatch") is None:
        raise UsageError(
            "--launcher slurm: sbatch is not on PATH; start from a login node of a Slurm cluster, or add --dry-run "
            "for the job script"
        )
    try:
        # sbatch creates no folder for the output.
        make_folder((launch.run_dir / OUTPUT_FILE).parent)
        done = subprocess.run(
            ["sbatch", "--parsable"], input=launch.script, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS,
            check=False,
        )  # fmt: skip
        if done.returncode == 0:
            atomic_write(launch.run_dir / SCRIPT_FILE, launch.script)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--launcher slurm: sbatch did not answer within {_TIMEOUT_SECONDS:g} s; see `sinfo`, and `squeue --me` for "
            "whether the job was accepted"
        ) from None
    except OSError as error:
        fix = fix_for_os_error(error, "choose another folder")
        raise UsageError(f"--run-dir {launch.run_dir}: cannot be written ({error.strerror}); {fix}") from None
    if done.returncode:
        raise UsageError(
            f"--launcher slurm: sbatch refused the job ({one_line(' '.join(done.stderr.split()))}); "
            "correct launch.slurm, --num-nodes, --num-gpus or the SBATCH_* variables"
        )
    return done.stdout.strip().partition(";")[0]


def _quote_directive(name: str, value: object) -> str:
    """Return the value of an option of sbatch. Raises UsageError for one that a line of the script cannot hold."""
    if not str(value).isprintable():
        raise UsageError(
            f"--launcher slurm: --{name}={one_line(str(value))} has a line break or control character, which a line of the "
            "job script cannot hold; change that name"
        )
    return shlex.quote(str(value))


def _quote_value(entry: str) -> str:
    name, _, value = entry.partition("=")
    return f"{name}={shlex.quote(value)}"
