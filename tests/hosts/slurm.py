"""Real Slurm on the hosts of a lab, and what happens to its jobs as a Markdown table: `python -m tests.hosts.slurm`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.lab import PATH, Lab, wait_for
from tests.hosts.lab import missing as missing_hosts
from tests.hosts.running import Run, dstrain, unbroken

DAEMONS = ("slurmctld", "slurmd", "sbatch", "munged")
CONF = """ClusterName=lab
SlurmctldHost=host1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PropagateResourceLimits=NONE
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,requeue_delay=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%h.log
NodeName=host[1-{hosts}] CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
HARM_AT = 7
JOB_SECONDS = 240.0


def missing() -> str | None:
    """Why there can be no Slurm on this machine; None where there can."""
    absent = [tool for tool in DAEMONS if shutil.which(tool, path=PATH) is None]
    return f"not installed: {', '.join(absent)} (Slurm)" if absent else missing_hosts()


class Slurm:
    """Slurm on all hosts of a lab, with its controller on host1."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.folder = lab, lab.folder / "slurm"
        (self.folder / "state").mkdir(parents=True)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf"), "DS_ACCELERATOR": "cpu"}
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, hosts=len(lab.numbers)))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for host in lab.numbers:
            self.start(host)
        wait_for(
            lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(lab.numbers)), 30, "no idle nodes"
        )

    def start(self, host: int) -> None:
        """Start the daemons of a host."""
        munge = ["--foreground", "--force", f"--key-file={self.folder}/munge.key", "--pid-file=/run/munge/pid"]
        munge += ["--log-file=/run/munge/log", "--seed-file=/run/munge/seed", "--socket=/run/munge/munge.socket.2"]
        self.lab.run(host, ["mkdir", "-p", "-m", "755", "/run/munge", "/run/slurmd"])
        self.lab.start(host, ["munged", *munge])
        if host == 1:
            self.lab.start(1, ["slurmctld", "-D", "-c"], env=self.env)
        self.lab.start(host, ["slurmd", "-D", "-N", f"host{host}"], env=self.env)

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands says on host1."""
        return self.lab.run(1, list(words), env=self.env)[1].strip()

    def submit(self, run: Run, *options: str) -> str:
        """Submit a run on all hosts with `dstrain train`; the job's id."""
        command = dstrain(run, "--launcher", "slurm", "--num-nodes", str(len(self.lab.numbers)), "--num-gpus", "1")
        code, said = self.lab.run(1, [*command, *options], env=self.env, cwd=run.folder)
        assert code == 0, said
        (job,) = re.findall(r"^job (\d+): ", said, re.M)
        return job

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` tells of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def wait(self, job: str, states: str = "COMPLETED|FAILED|CANCELLED|TIMEOUT") -> dict[str, str]:
        """Wait until a job is in one of these states."""
        found: dict[str, str] = {}

        def is_there() -> bool:
            nonlocal found
            time.sleep(0.3)
            found = self.show(job)
            return re.fullmatch(states, found.get("JobState", "")) is not None

        wait_for(is_there, JOB_SECONDS, f"job {job} is not {states}")
        return found


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    state: str
    restarts: int
    seconds: float
    """From the harm to the end of the job."""
    wrong: tuple[str, ...] = ()


Case = Callable[[Slurm, Run, str], None]
"""Does harm to a job that has taken HARM_AT steps."""


def nothing(slurm: Slurm, run: Run, job: str) -> None:
    """Let it go on."""


def time_is_nearly_up(slurm: Slurm, run: Run, job: str) -> None:
    """Send the signal that Slurm sends ahead of the time limit."""
    slurm.ask("scancel", "--batch", "--signal=USR1", job)


def node_fails(slurm: Slurm, run: Run, job: str) -> None:
    """Power a host off, and on again once Slurm has noticed."""
    slurm.lab.poweroff(2)
    wait_for(lambda: "down" in slurm.ask("sinfo", "-h", "-n", "host2", "-o", "%T"), 90, "host2 is not down")
    slurm.lab.boot(2)
    slurm.start(2)


def rank_is_killed(slurm: Slurm, run: Run, job: str) -> None:
    """Kill a rank after the first checkpoint."""
    slurm.lab.kill(2, r"-m dstrain\.cli train")


def job_is_cancelled(slurm: Slurm, run: Run, job: str) -> None:
    """End it for good."""
    slurm.ask("scancel", job)


def stop_is_asked_for(slurm: Slurm, run: Run, job: str) -> None:
    """Ask for a checkpoint and an end; nobody said that time is up."""
    slurm.ask("scancel", "--signal=TERM", job)


CASES: dict[str, tuple[Case, str, int, bool]] = {
    "two nodes, no harm": (nothing, "COMPLETED", 0, True),
    "USR1 ahead of the time limit": (time_is_nearly_up, "COMPLETED", 1, True),
    "a node fails": (node_fails, "COMPLETED", 1, True),
    "SIGKILL of a rank after a checkpoint": (rank_is_killed, "COMPLETED", 1, True),
    "scancel": (job_is_cancelled, "CANCELLED", 0, False),
    "scancel --signal=TERM": (stop_is_asked_for, "FAILED", 0, False),
}
"""Name -> harm, state of the job in the end, its restarts, whether the run reaches its last step."""


def suffer(name: str, lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """Submit a run, do harm to its job, and judge how it ends; an unfinished run is submitted again."""
    harm, state, restarts, is_finished = CASES[name]
    slurm, run = Slurm(lab), Run(folder)
    job = slurm.submit(run)
    wait_for_step(slurm, run, job, HARM_AT)
    began = time.monotonic()
    harm(slurm, run, job)
    run.pace(None)
    found = slurm.wait(job)
    seconds = time.monotonic() - began
    wrong = [f"state {found['JobState']}"] * (found["JobState"] != state)
    wrong += [f"{found['Restarts']} restarts"] * (int(found["Restarts"]) != restarts)
    if not is_finished:
        found = slurm.wait(slurm.submit(run))
        wrong += [f"the next job: {found['JobState']}"] * (found["JobState"] != "COMPLETED")
    rows = {row[:2]: row for row in run.losses()}  # a restart takes lost steps again
    wrong += ["other losses than an unbroken run"] * (sorted(rows.values()) != sorted(losses))
    left = [process.command for process in lab.left(3.0, but="munged|slurm|setsid")]
    wrong += [f"left: {left}"] * bool(left)
    if wrong:
        wrong += [path.read_text()[-3000:] for path in sorted((run.run_dir / "logs").glob("slurm-*.out"))]
    return Outcome(state, restarts, seconds, tuple(wrong))


def wait_for_step(slurm: Slurm, run: Run, job: str, step: int) -> None:
    """Wait until the run has logged a step. Raises AssertionError with the job's output where it ends before."""

    def is_there() -> bool:
        time.sleep(0.2)
        state = slurm.show(job)["JobState"] if run.step() < step else "RUNNING"
        output = "".join(path.read_text() for path in (run.run_dir / "logs").glob("slurm-*.out"))
        assert state in ("RUNNING", "PENDING", "CONFIGURING"), f"job {state}:\n{output[-3000:]}"
        return run.step() >= step

    wait_for(is_there, JOB_SECONDS, f"no step {step}")


def main() -> None:
    """A row for each case; what does not hold is told on stderr, and the others follow."""
    if reason := missing():
        sys.exit(reason)
    broken = 0
    with tempfile.TemporaryDirectory() as path:
        losses = unbroken(Path(path) / "unbroken").losses()
        print(
            "| harm at step 7 | job ends as | restarts by Slurm | run finished | seconds until the job's end |\n"
            + "|---" * 5
            + "|"
        )
        for number, name in enumerate(CASES):
            if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
                continue
            with Lab(Path(path) / f"lab-{number}") as lab:
                outcome = suffer(name, lab, Path(path) / f"job-{number}", losses)
            for line in outcome.wrong:
                print(f"{name}: {line}", file=sys.stderr, flush=True)
            broken += bool(outcome.wrong)
            finished = "yes" if CASES[name][3] else "by the next job"
            print(f"| {name} | {outcome.state} | {outcome.restarts} | {finished} | {outcome.seconds:.0f} |", flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
