"""Slurm on two hosts, and what becomes of a job, as a Markdown table: `python -m tests.hosts.slurm [NAME...]`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.launch.worker import log_path
from tests.hosts.faults import HARM_AT
from tests.hosts.lab import PATH, Lab, missing, wait_for
from tests.hosts.running import START_SECONDS, Run, dstrain, print_rows

SLURM_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
SLURM_CONF = """ClusterName=lab
SlurmctldHost=host1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={lab}/log/slurmctld
SlurmdLogFile={lab}/log/slurmd.%h
NodeName=host[1-{hosts}] CPUs={cpus} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=lab Nodes=ALL Default=YES GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
SHORT_TIMES = """AuthInfo=cred_expire=5
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=20
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2,sched_min_interval=0,requeue_delay=1
"""
DAEMONS = r"^\S*(munged|slurmctld|slurmd)\b|^: slurmscriptd"


def missing_slurm() -> str | None:
    """Why no Slurm can run on hosts of this machine; None where it can."""
    absent = [tool for tool in SLURM_TOOLS if shutil.which(tool, path=PATH) is None]
    return missing() or (f"not installed: {', '.join(absent)}" if absent else None)


class SlurmLab(Lab):
    """Hosts with munged and slurmd; slurmctld on host1."""

    def __init__(self, folder: Path, hosts: int = 2) -> None:
        super().__init__(folder, hosts)
        self._slurm = self.folder / "slurm"

    def __enter__(self) -> SlurmLab:
        self._slurm.mkdir(parents=True)
        key = self._slurm / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        conf = SLURM_CONF.format(folder=self._slurm, lab=self.folder, hosts=len(self.numbers), cpus=os.cpu_count())
        (self._slurm / "slurm.conf").write_text(conf + SHORT_TIMES)
        super().__enter__()
        self.wait_for_nodes()
        return self

    def _boot(self, numbers: Iterable[int]) -> None:
        super()._boot(numbers)
        for number in numbers:
            self._within_host(number, "mkdir", "-p", "/etc/slurm", "/run/munge", "/run/slurmd", f"{self._slurm}/state")
            self._within_host(number, "mount", "--bind", str(self._slurm), "/etc/slurm")
            words = [f"--{name}=/run/munge/{name}" for name in ("pid-file", "log-file", "seed-file")]
            words += [f"--key-file={self._slurm}/munge.key", "--socket=/run/munge/munge.socket.2"]
            self._within_host(number, "munged", "--force", *words)
            if number == 1:
                self._within_host(number, "slurmctld", "-c")
            self._within_host(number, "slurmd", "-N", f"host{number}")

    def _within_host(self, number: int, *words: str) -> None:
        done = subprocess.run([*self._within(number), *words], env={"PATH": PATH}, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stderr}"

    def wait_for_nodes(self) -> None:
        """Wait until Slurm would start a job on any of the hosts."""
        wait_for(
            lambda: self.ask("sinfo", "-h", "-p", "lab", "-t", "idle", "-o", "%D") == str(len(self.numbers)),
            60,
            "no idle nodes",
        )

    def ask(self, *words: str) -> str:
        """Return what a Slurm command on host1 prints."""
        return self.run(1, words)[1].strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        return self._fact(job, "JobState")

    def restarts(self, job: str) -> int:
        """Return how often a job was requeued."""
        return int(self._fact(job, "Restarts") or 0)

    def exit_code(self, job: str) -> str:
        """Return the exit code of the job script, and the signal that ended it after a colon."""
        return self._fact(job, "ExitCode")

    def _fact(self, job: str, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""


@dataclass(frozen=True)
class Row:
    """What became of a job."""

    what: str
    seconds: float
    """From the harm, or the submission where there is none, to the end of the job."""
    state: str
    """Of the job at the end."""
    code: int
    """Exit code of the job script."""
    restarts: int
    resumed_at: list[int]
    """Steps from which it went on."""
    wrong: tuple[str, ...] = ()
    """What is not as promised."""


class Job:
    """A submitted run."""

    def __init__(self, lab: SlurmLab, folder: Path, env: Mapping[str, str] | None = None, **changes: Any) -> None:
        """`changes`: keys of the recipe."""
        self.lab, self.run = lab, Run(folder, **changes)
        self.id = self.submit(env)
        self.harmed_at = time.monotonic()

    def submit(self, env: Mapping[str, str] | None = None) -> str:
        """Submit two ranks on two nodes; return the job's id."""
        words = dstrain(self.run, "--launcher", "slurm", "--num-nodes", "2", "--num-gpus", "1")
        code, said = self.lab.run(1, words, env={"DS_ACCELERATOR": "cpu", **(env or {})}, cwd=self.run.folder)
        found = re.search(r"^submitted job (\d+); its output goes to (.*)$", said, re.M)
        assert found, f"{code}: {said}"
        self.output = Path(found[2])
        return found[1]

    def wait_for_step(self, step: int) -> None:
        """Wait until the step is logged, however often the job is requeued."""

        def is_there() -> bool:
            assert self.lab.state(self.id) in ("PENDING", "RUNNING", "COMPLETING"), self.said()
            return self.run.step() >= step

        wait_for(is_there, START_SECONDS, f"no step {step}: {self.said()}")
        self.harmed_at = time.monotonic()

    def kill_rank(self) -> None:
        """SIGKILL rank 1."""
        host, pid = self.run.rank(1)
        assert self.lab.kill(host, pid)

    def go_on(self, restarts: int) -> None:
        """Wait until the job was requeued; its steps take no time from then on."""
        requeued = lambda: self.lab.restarts(self.id) == restarts  # noqa: E731
        wait_for(requeued, START_SECONDS, f"the job is not requeued: {self.said()}")
        self.run.pace(None)

    def said(self) -> str:
        """The end of the job's output and of rank 0's log."""
        logs = [self.output, log_path(self.run.run_dir, 0)]
        return "\n".join(path.read_text()[-3000:] for path in logs if path.exists())

    def row(self, what: str, state: str, code: int, restarts: int, losses: Sequence[Any] | None) -> Row:
        """Wait until the job has ended; compare the outcome, and the losses where given, with what is promised."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.lab.state(self.id) in ended, 2 * START_SECONDS, f"the job does not end: {self.said()}")
        seconds = time.monotonic() - self.harmed_at
        found = self.lab.state(self.id), self.lab.exit_code(self.id), self.lab.restarts(self.id)
        events = self.run.run_dir / "events.jsonl"
        rows = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        left = self.lab.left(within=5, but=DAEMONS)
        wrong = [f"{found}, not {(state, code, restarts)}"] if found != (state, f"{code}:0", restarts) else []
        wrong += [f"left: {left}"] if left else []
        wrong += ["other losses than those of one host"] if losses is not None and self.run.losses() != losses else []
        resumed = [event["step"] for event in rows if event["event"] == "resumed"]
        told = [self.said()] if wrong else []
        return Row(what, round(seconds, 1), found[0], code, found[2], resumed, (*wrong, *told))


def two_nodes(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """Two ranks on two nodes give the losses of two ranks on one host."""
    job = Job(lab, folder)
    job.run.pace(None)
    row = job.row("two nodes, one task each", "COMPLETED", 0, 0, losses)
    hosts = [job.run.rank(rank)[0] for rank in (0, 1)]
    return row if hosts == [1, 2] else replace(row, wrong=(*row.wrong, f"ranks on hosts {hosts}"))


def signal_ahead(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """What Slurm sends to the job script ahead of the limit, sent by hand."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    lab.ask("scancel", "--batch", "--signal=USR1", job.id)
    job.go_on(restarts=1)
    return job.row("SIGUSR1 to the job script", "COMPLETED", 0, 1, losses)


def time_limit(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """Slurm's own signal, which comes up to a minute earlier than asked for."""
    job = Job(lab, folder, {"SBATCH_SIGNAL": "B:USR1@20"}, launch={"slurm": {"time": "2"}})
    job.run.pace(3.0)
    job.wait_for_step(1)
    job.go_on(restarts=1)
    return job.row("time limit of 2 min, SIGUSR1 20 s ahead", "COMPLETED", 0, 1, losses)


def rank_killed(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """The attempt has written a checkpoint: the job is requeued."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    job.kill_rank()
    job.go_on(restarts=1)
    return job.row("SIGKILL of a rank, with a new checkpoint", "COMPLETED", 0, 1, losses)


def rank_killed_early(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """The attempt has written no checkpoint: another one would end in the same way."""
    job = Job(lab, folder)
    job.wait_for_step(1)
    job.kill_rank()
    row = job.row("SIGKILL of a rank, no new checkpoint", "FAILED", 137, 0, None)
    return replace(row, wrong=(*row.wrong, *(["it had a checkpoint"] if job.run.saved() else [])))


def node_failure(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """A node loses its power, and has it again after Slurm has noticed."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    lab.poweroff(2)
    wait_for(lambda: lab.restarts(job.id) == 1, 90, f"the job is not requeued: {job.said()}")
    job.run.pace(None)
    lab.boot(2)
    return job.row("a node powered off, later on again", "COMPLETED", 0, 1, losses)


def cancelled(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """The ranks save; the job is not requeued; another job of the run folder goes on."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    lab.ask("scancel", job.id)
    row = job.row("scancel", "CANCELLED", 75, 0, None)
    step, saved = job.run.step(), job.run.saved()
    job.run.pace(None)
    job.id = job.submit()
    again = job.row("the same command again", "COMPLETED", 0, 0, losses)
    lost = [f"step {step} was taken, {saved} is the newest checkpoint"] if step != saved else []
    return replace(row, resumed_at=again.resumed_at, wrong=(*row.wrong, *again.wrong, *lost))


def preempted(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """A job of a partition with priority takes both nodes; Slurm sends SIGTERM and waits for GraceTime."""
    job = Job(lab, folder)
    job.wait_for_step(HARM_AT)
    words = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"]
    lab.ask("sbatch", *words)
    job.go_on(restarts=1)
    step, saved = job.run.step(), job.run.saved()
    row = job.row("preempted, GraceTime of 20 s", "COMPLETED", 0, 1, losses)
    lost = [f"step {step} was taken, {saved} is the newest checkpoint"] if step != saved else []
    return replace(row, wrong=(*row.wrong, *lost))


def bad_data(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """The ranks refuse the data."""
    job = Job(lab, folder, data={"train": str(_write_bad_data(folder)), "max_length": 64})
    return job.row("data that cannot be used", "FAILED", 2, 0, None)


def _write_bad_data(folder: Path) -> Path:
    path = folder.with_name(f"{folder.name}-bad.jsonl")
    path.write_text('{"no": "pair"}\n' * 8)
    return path


def second_job(lab: SlurmLab, folder: Path, losses: Sequence[Any]) -> Row:
    """It waits for the end of the first one, and has nothing to do then."""
    job = Job(lab, folder)
    job.wait_for_step(1)
    first, job.id = job.id, job.submit()
    time.sleep(3)
    waits = lab.ask("squeue", "--noheader", "--format=%T %r", f"--job={job.id}")
    job.run.pace(None)
    row = job.row("a second job of the run folder", "COMPLETED", 0, 0, losses)
    held = waits == "PENDING Dependency" and lab.state(first) == "COMPLETED"
    return row if held else replace(row, wrong=(*row.wrong, f"it was {waits}"))


ROWS = (
    two_nodes,
    signal_ahead,
    time_limit,
    preempted,
    rank_killed,
    rank_killed_early,
    node_failure,
    cancelled,
    bad_data,
    second_job,
)


def main() -> None:
    """Print a row for each."""
    columns = ("harm", "to the end s", "state", "exit code", "restarts", "resumed at step")
    print_rows(ROWS, missing_slurm(), SlurmLab, columns, to_cells)


def to_cells(row: Row) -> tuple[Any, ...]:
    """Return what the table shows of a row."""
    return row.what, row.seconds, row.state, row.code, row.restarts, ", ".join(map(str, row.resumed_at))


if __name__ == "__main__":
    main()
