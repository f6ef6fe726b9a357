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
from dstrain.launch.topology import count_gpus, is_cpu_requested

CPUS_PER_GPU = 8
"""Cores of a task with a GPU, for data workers; Slurm gives one if none are asked for."""
SECONDS_TO_SAVE = 120
"""Time before the job's limit at which the ranks are asked for a checkpoint; Slurm may send the signal a minute earlier."""
MAX_RETRIES = 3
"""Times that a job is queued again after a failure that followed a new checkpoint."""
_SUBMIT_TIMEOUT_SECONDS = 120.0


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
    use_cpu = is_cpu_requested(env)
    num_gpus = options.num_gpus or (1 if use_cpu else count_gpus())
    num_nodes = 1 if options.num_nodes is None else options.num_nodes
    if not num_gpus:
        raise UsageError(
            "--launcher slurm: this host has no GPU, so the number per node is not known; give --num-gpus N, "
            "or set DS_ACCELERATOR=cpu for a job on CPUs"
        )
    if num_nodes < 1:
        raise UsageError(f"--num-nodes {num_nodes} starts no process; give 1 or more")
    path = run_dir / "slurm.sbatch"
    script = make_script(
        path=path,
        name=name,
        num_nodes=num_nodes,
        tasks_per_node=num_gpus,
        use_cpu=use_cpu,
        arguments=arguments,
        config=config,
    )
    return SlurmLaunch(path=path, script=script, num_nodes=num_nodes, tasks_per_node=num_gpus, use_cpu=use_cpu)


def make_script(
    *,
    path: Path,
    name: str,
    num_nodes: int,
    tasks_per_node: int,
    use_cpu: bool,
    arguments: list[str],
    config: LaunchConfig,
) -> str:
    """Return the batch script. Raises UsageError for a value that a line of it cannot hold."""
    run_dir, slurm = path.parent, config.slurm
    # Jobs of one run folder have one name, which no job of another folder has.
    job_name = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]}"
    gpus = {} if use_cpu else {"gpus-per-node": str(tasks_per_node), "cpus-per-task": str(CPUS_PER_GPU)}
    own = {"partition": slurm.partition, "account": slurm.account, "time": slurm.time}
    directives = {
        "job-name": job_name, "nodes": str(num_nodes), "ntasks-per-node": str(tasks_per_node), **gpus,
        **{key: value for key, value in own.items() if value}, "chdir": os.getcwd(),
        "output": f"{str(run_dir / 'logs').replace('%', '%%')}/slurm-%j.out", "open-mode": "append",
    }  # fmt: skip
    exports = [entry.partition("=") for entry in config.env if "=" in entry]
    setup = ["# launch.slurm.setup", "set -e", *slurm.setup, "set +e", ""] if slurm.setup else []
    variables = (
        ["# launch.env", *(f"export {key}={shlex.quote(value)}" for key, _, value in exports), ""] if exports else []
    )
    return "\n".join([
        "#!/bin/bash",
        "# Written by `dstrain train --launcher slurm`. Edit it where needed, and submit it again:",
        f"#     sbatch {one_line(shlex.quote(str(path)))}",
        *(f"#SBATCH --{key}={_quote_directive(key, value)}" for key, value in directives.items()),
        "# One job of this name at a time: a second one waits for the end of the first.",
        "#SBATCH --dependency=singleton",
        "# When a node fails, Slurm queues the job again, and the run resumes.",
        "#SBATCH --requeue",
        f"# {SECONDS_TO_SAVE} s before the time limit this script gets USR1.",
        f"#SBATCH --signal=B:USR1@{SECONDS_TO_SAVE}",
        "",
        f"run_dir={shlex.quote(str(run_dir))}",
        f"python={shlex.quote(sys.executable)}",
        f"max_retries={MAX_RETRIES}  # after failures that followed a new checkpoint",
        "",
        *setup,
        *variables,
        "# Values that the ranks exchange are signed with it.",
        "DSTRAIN_RANK_KEY=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
        "export DSTRAIN_RANK_KEY",
        "",
        "newest_checkpoint() {",
        "    find \"$run_dir/checkpoints\" -maxdepth 1 -name 'step-*[0-9]' 2>/dev/null | sort | tail -n 1",
        "}",
        "before=$(newest_checkpoint)",
        "",
        "# Ahead of the time limit: the ranks finish their step, write a checkpoint and end with 75.",
        "is_time_up=",
        "trap 'is_time_up=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1",
        "",
        "# One task per GPU; dstrain reads rank and world size from Slurm's variables.",
        "# --wait, not --kill-on-bad-exit: a rank that ends with 75 must not cause the others to be killed.",
        "# --cpus-per-task is repeated: since Slurm 22.05 srun does not inherit it from sbatch.",
        'srun --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \\',
        f'    "$python" -u -m dstrain.cli {shlex.join(arguments)} &',
        "srun=$!",
        'wait "$srun"',
        "code=$?",
        'while [ "$code" -eq $((128 + $(kill -l USR1))) ]; do  # the signal ended the wait, not srun',
        '    wait "$srun"',
        "    code=$?",
        "done",
        "",
        "# 75: stopped after a complete checkpoint. 2: the recipe or the data must be changed first.",
        'if [ "$code" -eq 75 ] && [ -n "$is_time_up" ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        'elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 75 ] && [ "$(newest_checkpoint)" != "$before" ]; then',
        '    retries_file="$run_dir/.workers/slurm-$SLURM_JOB_ID.retries"',
        '    retries=$(cat "$retries_file" 2>/dev/null || echo 0)',
        '    if [ "$retries" -lt "$max_retries" ]; then',
        '        echo $((retries + 1)) >"$retries_file"',
        '        echo "slurm.sbatch: ended with $code after a new checkpoint; restart $((retries + 1)) of $max_retries"',
        '        scontrol requeue "$SLURM_JOB_ID"',
        "    fi",
        "fi",
        'exit "$code"',
        "",
    ])  # fmt: skip


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
