"""The Slurm launcher: a batch script that starts a run with one task per GPU, and its submission."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dstrain.config.schema import LaunchConfig
from dstrain.errors import UsageError, one_line
from dstrain.files import atomic_write
from dstrain.launch.command import LaunchOptions
from dstrain.launch.topology import is_cpu_requested

_SUBMIT_TIMEOUT_SECONDS = 120.0

SCRIPT = """\
#!/bin/bash
# Written by `dstrain train --launcher slurm`. Edit it where needed, and submit it again:
#     sbatch {path}
{directives}
#SBATCH --open-mode=append
# One job of this name at a time: a second one waits for the end of the first.
#SBATCH --dependency=singleton
# When a node fails, Slurm queues the job again, and the run resumes.
#SBATCH --requeue
# 120 s before the time limit this script gets USR1. More, if a checkpoint takes longer.
#SBATCH --signal=B:USR1@120

run_dir={run_dir}
python={python}
max_retries=3  # after failures that followed a new checkpoint
{setup}{variables}
# Values that the ranks exchange are signed with it.
DSTRAIN_RANK_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
export DSTRAIN_RANK_KEY

newest_checkpoint() {{
    find "$run_dir/checkpoints" -maxdepth 1 -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1
}}
before=$(newest_checkpoint)

# Ahead of the time limit: the ranks finish their step, write a checkpoint and end with 75.
is_time_up=
trap 'is_time_up=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# One task per GPU; dstrain reads rank and world size from Slurm's variables.
# --wait, not --kill-on-bad-exit: a rank that ends with 75 must not cause the others to be killed.
# --cpus-per-task is repeated: since Slurm 22.05 srun does not inherit it from sbatch.
srun --wait=60 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
    "$python" -u -m dstrain.cli {arguments} &
srun=$!
wait "$srun"
code=$?
while [ "$code" -eq $((128 + $(kill -l USR1))) ]; do  # the signal ended the wait, not srun
    wait "$srun"
    code=$?
done

# 75: stopped after a complete checkpoint. 2: the recipe or the data must be changed first.
if [ "$code" -eq 75 ] && [ -n "$is_time_up" ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 75 ] && [ "$(newest_checkpoint)" != "$before" ]; then
    retries_file="$run_dir/.workers/slurm-$SLURM_JOB_ID.retries"
    retries=$(cat "$retries_file" 2>/dev/null || echo 0)
    if [ "$retries" -lt "$max_retries" ]; then
        echo $((retries + 1)) >"$retries_file"
        echo "slurm.sbatch: ended with $code after a new checkpoint; restart $((retries + 1)) of $max_retries"
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
"""
"""The batch script. Python's braces are doubled."""


@dataclass(frozen=True, kw_only=True)
class SlurmLaunch:
    """A batch script before it is submitted."""

    path: Path
    """File for the script, in the run folder."""
    script: str
    num_nodes: int
    tasks_per_node: int
    use_cpu: bool
    """True if no GPU is used."""

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.num_nodes * self.tasks_per_node

    @property
    def ranks(self) -> range:
        return range(self.world_size)


def plan_slurm(
    options: LaunchOptions, arguments: list[str], env: Mapping[str, str], config: LaunchConfig, run_dir: Path, name: str
) -> SlurmLaunch:
    """Plan a job that runs `dstrain ARGUMENTS` as each of its ranks; `name` is the run's. Raises UsageError."""
    given = {
        "--hostfile": options.hostfile, "--include": options.include, "--exclude": options.exclude,
        "--no-ssh": options.no_ssh, "--node-rank": options.node_rank is not None,
        "--master-addr": options.master_addr, "--master-port": options.master_port is not None,
    }  # fmt: skip
    if names := [option for option, is_given in given.items() if is_given]:
        raise UsageError(
            f"--launcher slurm: {', '.join(names)} cannot be combined with it, since Slurm chooses the nodes; "
            "give --num-nodes and --num-gpus (per node)"
        )
    if unset := [entry for entry in config.env if "=" not in entry and entry not in env]:
        raise UsageError(f"launch.env: {unset[0]} is not set here; set it, write {unset[0]}=value, or remove it")
    num_nodes = 1 if options.num_nodes is None else options.num_nodes
    for option, count in (("--num-nodes", options.num_nodes), ("--num-gpus", options.num_gpus)):
        if count is not None and count < 1:
            raise UsageError(f"{option} {count} starts no process; give 1 or more")
    use_cpu = is_cpu_requested(env)
    nodes = list_nodes(env.get("SBATCH_PARTITION") or config.slurm.partition)
    known_gpus = min((gpus for _, gpus in nodes if gpus), default=0)
    tasks_per_node = options.num_gpus or (1 if use_cpu else known_gpus)
    if not tasks_per_node:
        raise UsageError(
            "--launcher slurm: sinfo does not tell how many GPUs a node has; give --num-gpus N, "
            "or set DS_ACCELERATOR=cpu for a job on CPUs"
        )
    # Of a node's cores, the share of its GPUs; a task without them gets what sbatch gives.
    shares = [cores // gpus for cores, gpus in nodes if gpus >= tasks_per_node]
    cpus_per_task = 0 if use_cpu or not shares else max(1, min(shares))
    path = run_dir / "slurm.sbatch"
    script = make_script(
        path=path, name=name, num_nodes=num_nodes, tasks_per_node=tasks_per_node, cpus_per_task=cpus_per_task,
        use_cpu=use_cpu, arguments=arguments, config=config,
    )  # fmt: skip
    return SlurmLaunch(path=path, script=script, num_nodes=num_nodes, tasks_per_node=tasks_per_node, use_cpu=use_cpu)


def list_nodes(partition: str | None) -> list[tuple[int, int]]:
    """Return (cores, GPUs) of the kinds of nodes in a partition, None for the default one; none if sinfo does not tell."""
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--exact", "--format=%P %c %G"],
            capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    nodes = []
    for line in done.stdout.splitlines():
        name, cores, resources = line.split(maxsplit=2)
        is_wanted = name.endswith("*") if partition is None else name.removesuffix("*") in partition.split(",")
        if is_wanted and cores.isdecimal():
            nodes.append((int(cores), sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", resources)))))
    return nodes


def make_script(
    *, path: Path, name: str, num_nodes: int, tasks_per_node: int, cpus_per_task: int, use_cpu: bool,
    arguments: list[str], config: LaunchConfig,
) -> str:  # fmt: skip
    """Return the batch script. Raises UsageError for a value that a line of it cannot hold.

    `cpus_per_task` 0: what sbatch gives.
    """
    run_dir, slurm = path.parent, config.slurm
    values = {
        # Jobs of one run folder have one name, which no job of another folder has.
        "job-name": f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]}",
        "partition": slurm.partition, "account": slurm.account, "time": slurm.time,
        "nodes": str(num_nodes), "ntasks-per-node": str(tasks_per_node),
        "gpus-per-node": "" if use_cpu else str(tasks_per_node), "cpus-per-task": str(cpus_per_task or ""),
        "chdir": os.getcwd(), "output": f"{str(run_dir / 'logs').replace('%', '%%')}/slurm-%j.out",
    }  # fmt: skip
    exports = [entry.partition("=") for entry in config.env if "=" in entry]
    return SCRIPT.format(
        path=one_line(shlex.quote(str(path))),
        directives="\n".join(
            f"#SBATCH --{key}={_quote_directive(key, value)}" for key, value in values.items() if value
        ),
        run_dir=shlex.quote(str(run_dir)),
        python=shlex.quote(sys.executable),
        setup="\n".join(["", "set -e", *slurm.setup, "set +e", ""]) if slurm.setup else "",
        variables="".join(f"\nexport {key}={shlex.quote(value)}" for key, _, value in exports),
        arguments=shlex.join(arguments),
    )


def _quote_directive(key: str, value: str) -> str:
    """Return a value as sbatch reads it. Raises UsageError."""
    if not value.isprintable():
        raise UsageError(
            f"--launcher slurm: --{key}={one_line(value)} has a line break or control character, which a line of a "
            "batch script cannot hold; change that name"
        )
    if re.fullmatch(r"[\w.,:/@%+=-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def submit(launch: SlurmLaunch) -> str:
    """Write the script and submit it; return the job's id. Raises UsageError with sbatch's message."""
    launch.path.parent.joinpath("logs").mkdir(parents=True, exist_ok=True)
    launch.path.parent.joinpath(".workers").mkdir(exist_ok=True)
    atomic_write(launch.path, launch.script)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(launch.path)],
            capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UsageError(
            "--launcher slurm: there is no `sbatch` on PATH; run it on a login node of the cluster, or leave the option out"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--launcher slurm: sbatch did not answer within {_SUBMIT_TIMEOUT_SECONDS:g} s; see `sinfo` and `squeue --me`"
        ) from None
    if done.returncode:
        said = one_line(" ".join((done.stderr or done.stdout).split()))
        raise UsageError(
            f"--launcher slurm: sbatch refused the job ({said}); change launch.slurm in the recipe, "
            f"--num-nodes or --num-gpus; other options of sbatch can be set as SBATCH_* variables"
        )
    return done.stdout.strip().split(";")[0]
