"""Faults of a launch on several hosts, and the required outcome of each."""

# After every fault `dstrain train` ends with the exit code of the contract and an error that names the cause; no process
# of the launch remains on any host; at most one save interval is lost; and the same command resumes, with the losses of an
# uninterrupted run. `suffer` checks this and reports deviations as `wrong`; the rest of the module only describes faults.

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.hosts.lab import Command, Lab, wait_for
from tests.hosts.running import PACE, SAVE_EVERY, SILENCE, Run, start

HARM_AT = 7
"""The step that is waited for: two after a checkpoint."""
LEFT_SECONDS = 2 * SILENCE
"""What is left may take so long to notice that it is alone, where nobody can tell it."""
CLEANED = 6
"""Seconds for a launch to end once a host was given up."""
PYTHON = r"^\S*python\S* (-[Pu] )*-m "
HOST_WORKER = PYTHON + r"dstrain\.launch\.host_worker"
SSHD = "^sshd: "
SECRET = {"HF_TOKEN": "hf-a-secret-of-these-tests"}
"""In the environment of every launch: it must reach no disk."""


@dataclass
class Scene:
    """Two hosts on which a run trains."""

    lab: Lab
    run: Run
    job: Command

    def kill(self, host: int, which: str | int, number: int = signal.SIGKILL) -> None:
        """Send a signal to what must be there."""
        there = [process.command[:200] for process in self.lab.processes(host)]
        assert self.lab.kill(host, which, number), f"{which} is not on host{host}: {there}"

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.kill(*self.run.rank(rank), number)


Harm = Callable[[Scene], object]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and what `dstrain train` must make of it."""

    what: str
    on: str
    harm: Harm
    code: int
    said: str
    """A regular expression for a line of what it says."""
    within: float = 20.0
    """Seconds from the harm to its end."""
    mend: Callable[[Lab], object] = lambda lab: None
    """What has to be done before the same command can go on."""
    lost: int = SAVE_EVERY
    """Steps at most."""
    cut_off: bool = False
    """The host cannot be reached, so sshd's ends of connections stay there: they are its own, and hold nothing of ours."""
    but: str = ""
    """A regular expression for what may be left: what was stopped and nobody can end."""
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    what: str
    on: str
    seconds: float
    """From the harm to the end of `dstrain train`."""
    code: int
    said: str
    left: str
    lost: int | None
    """Steps; None where none was taken."""
    wrong: tuple[str, ...] = ()
    """What is not as promised."""


def suffer(fault: Fault, lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """Train on the lab's hosts, do the harm, and judge. `losses`: of a run that nothing happened to."""
    run = Run(folder, **{"launch": {"heartbeat_timeout_seconds": SILENCE}, **fault.recipe})
    job = start(lab, run, env=SECRET)
    run.wait_for_step(job, HARM_AT)
    begin = time.monotonic()
    fault.harm(Scene(lab, run, job))
    outcome = judge(fault, lab, job, begin)
    lost = run.step() - run.saved()
    wrong = [*outcome.wrong]
    if not 0 <= lost <= fault.lost:
        wrong.append(f"step {run.step()} was taken, {run.saved()} is the newest checkpoint")
    if fault.code != 0:
        fault.mend(lab)
        wrong += go_on(lab, run, fault)
    return replace(outcome, lost=lost, wrong=(*wrong, *differences(lab, run, losses)))


def differences(lab: Lab, run: Run, losses: Sequence[Any]) -> Iterator[str]:
    """From a run that nothing happened to, and from a launch that keeps to itself."""
    if run.losses() != list(losses):
        yield "other losses than those of a run that nothing happened to"
    if kept := secrets_kept(lab, run):
        yield f"the environment lies on a disk: {kept}"
    if killed := lab.pkills():
        yield f"a launch ends what it started by id, never by name: {killed}"


def secrets_kept(lab: Lab, run: Run) -> list[str]:
    """The files that hold the secret of the environment: of the run, of the hosts' homes, of what each host has for itself."""
    secret = next(iter(SECRET.values()))
    shared = [path for folder in (run.folder, lab.folder / "home") for path in folder.rglob("*") if path.is_file()]
    found = [str(path) for path in shared if secret.encode() in path.read_bytes()]
    for host in lab.numbers:
        found += lab.run(host, ["grep", "-rls", secret, "/run", "/dev/shm"])[1].split()
    return found


def judge(fault: Fault, lab: Lab, job: Command, begin: float) -> Outcome:
    """Whether it ends in time, with the code and the sentence, and nothing is left."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(max(fault.within, 60.0))
    code = job.code
    if code is None:
        raise TimeoutError(f"it does not end; alive: {lab.left()}\n{job.output()[-4000:]}")
    seconds = time.monotonic() - begin
    left = lab.left(within=LEFT_SECONDS, but=_may_be_left(fault))
    gone = time.monotonic() - begin - seconds
    told = job.output()
    promised = {
        f"left: {left}": not left,
        f"code {code}": code == fault.code,
        f"'{fault.said}' was not said": re.search(fault.said, told, re.M) is not None,
        f"ended after {seconds:.1f} s": seconds <= fault.within,
    }
    wrong = [what for what, holds in promised.items() if not holds]
    left_for = str(left) if left else "nothing" if gone < 1 else f"nothing after {gone:.1f} s"
    row = Outcome(fault.what, fault.on, round(seconds, 1), code, decisive(told), left_for, None)
    return replace(row, wrong=(*wrong, told[-6000:]) if wrong else ())


def _may_be_left(fault: Fault) -> str:
    return "|".join([*([SSHD] if fault.cut_off else []), *([fault.but] if fault.but else [])]) or "$^"


def decisive(told: str) -> str:
    """The line that says how it came out."""
    lines = [line for line in told.splitlines() if line.startswith(("dstrain: ", "error: ", "Error: ", "finished"))]
    return lines[-1] if lines else "nothing"


def go_on(lab: Lab, run: Run, fault: Fault) -> Iterator[str]:
    """The same command again; what is wrong where it does not go on from the checkpoint and end with 0."""
    found = run.saved()
    run.pace(None)
    job = start(lab, run)
    if code := job.wait(120):
        yield f"going on ended with {code}:\n{job.output()[-6000:]}"
    if left := lab.left(within=2.0, but=SSHD if fault.cut_off else "$^"):
        yield f"left after going on: {left}"
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in events if event["event"] == "resumed"][-1:]
    if resumed != ([found] if found else []):
        yield f"went on from {resumed}, {found} was the newest checkpoint"


def _signals(number: int, group: bool = False) -> Harm:
    return lambda scene: scene.job.signal(number, group=group)


def _twice(scene: Scene) -> None:
    step = scene.run.step()
    scene.run.pace(8.0)
    scene.run.wait_for_step(scene.job, step + 1)  # the step after it began with that pace
    time.sleep(2 * PACE)
    scene.job.signal(signal.SIGTERM)
    time.sleep(1.0)
    scene.job.signal(signal.SIGTERM)


def _saved_on_request(scene: Scene) -> None:
    scene.job.signal(signal.SIGUSR1)
    wait_for(lambda: scene.run.saved() % SAVE_EVERY, 20, "no checkpoint between two that are due")
    scene.run.pace(None)


def _pulled_for_a_while(scene: Scene) -> None:
    scene.lab.link(2, False)
    time.sleep(5.0)
    scene.lab.link(2, True)
    scene.run.pace(None)


KILLED = "was killed by SIGKILL"
ASKED = r"asked \d worker\(s\) to write a checkpoint and stop"
FAULTS = (
    Fault("SIGKILL of a rank", "host2", lambda scene: scene.kill_rank(1), 1, f"rank 1 on host2 {KILLED}"),
    Fault("SIGKILL of a rank", "host1", lambda scene: scene.kill_rank(0), 1, f"rank 0 on host1 {KILLED}"),
    Fault("SIGKILL of dstrain", "host1", _signals(signal.SIGKILL), -signal.SIGKILL, "", within=1.0),
    Fault("SIGKILL of the host worker", "host2", lambda scene: scene.kill(2, HOST_WORKER), 1, "^dstrain: .*host2"),
    Fault("SIGTERM", "host1", _signals(signal.SIGTERM), 75, ASKED, lost=0),
    Fault("SIGINT to the group: Ctrl-C", "host1", _signals(signal.SIGINT, group=True), 75, ASKED, lost=0),
    Fault("SIGHUP to the group: terminal closed", "host1", _signals(signal.SIGHUP, group=True), 75, ASKED, lost=0),
    Fault("SIGUSR1", "host1", _saved_on_request, 0, "^finished: ", within=60, lost=0),
    Fault("SIGTERM to a rank", "host2", lambda scene: scene.kill_rank(1, signal.SIGTERM), 75, "", lost=0),
    Fault("SIGTERM twice, the step takes 8 s", "host1", _twice, 1, "ended at once, as asked", within=6.0),
    Fault("ssh sessions cut", "host2", lambda scene: scene.lab.cut_ssh(2), 1, "^dstrain: .*host2"),
    Fault(
        "cable pulled", "host2", lambda scene: scene.lab.link(2, False), 1, "^dstrain: .*host2",
        within=SILENCE + CLEANED, mend=lambda lab: lab.link(2, True), cut_off=True,
    ),
    Fault(
        "every packet dropped", "host2", lambda scene: scene.lab.drop(2, True), 1, "^dstrain: .*host2",
        within=SILENCE + CLEANED, mend=lambda lab: lab.drop(2, False), cut_off=True,
    ),
    Fault(
        "powered off", "host2", lambda scene: scene.lab.poweroff(2), 1, "^dstrain: .*host2",
        within=SILENCE + CLEANED, mend=lambda lab: lab.boot(2),
    ),
    Fault(
        "cable pulled for 5 s", "host2", _pulled_for_a_while, 0, "^finished: ", within=40, lost=0,
        recipe={"launch": {"heartbeat_timeout_seconds": 30}, "timeout_minutes": 0.5},
    ),
    Fault(
        "SIGSTOP of a rank, timeout 6 s", "host2", lambda scene: scene.kill_rank(1, signal.SIGSTOP), 1,
        "^dstrain: .*rank", within=30, recipe={"timeout_minutes": 0.1},
    ),
)  # fmt: skip
SMOKE = ("SIGKILL of a rank on host2", "SIGTERM on host1", "cable pulled on host2")


def name(fault: Fault) -> str:
    """Of a test."""
    return f"{fault.what} on {fault.on}"
