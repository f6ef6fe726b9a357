"""Launches that must be refused before anything starts, and unusual ones that must work."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import files
from pathlib import Path
from typing import Any, Literal

from tests.hosts.faults import HARM_AT, Fault, Outcome, decisive, differences, judge
from tests.hosts.lab import Lab, wait_for
from tests.hosts.running import SILENCE, START_SECONDS, Run, start, start_by_hand
from tests.workers import ROOT


@dataclass(frozen=True)
class Refusal:
    """A launch that cannot be."""

    what: str
    lines: tuple[str, ...]
    """Of the hostfile."""
    said: str
    within: float = 30.0
    before: Callable[[Lab, Run], object] = lambda lab, run: None


def refuse(refusal: Refusal, lab: Lab, folder: Path) -> Outcome:
    """Whether it exits with 2, says why, leaves nothing, and has not begun a run."""
    run = _new(folder)
    refusal.before(lab, run)
    begin = time.monotonic()
    job = start(lab, run, hostfile=lab.hostfile(refusal.lines))
    fault = Fault(refusal.what, "start", lambda scene: None, 2, refusal.said, within=refusal.within)
    outcome = judge(fault, lab, job, begin)
    begun = [name for name in ("metrics.jsonl", "checkpoints") if (run.run_dir / name).exists()]
    return replace(outcome, wrong=(*outcome.wrong, *(f"{name} is there" for name in begun)))


NOISE = r"""
echo '{"host_info": {}}'; printf '{"host_info": '; head -c 3000000 /dev/zero | tr '\0' x; head -c 3000 /dev/urandom
(while sleep 0.1; do printf noise; done 2> /dev/null) & disown
echo "an error of the login script" >&2; shopt -s expand_aliases; alias exec='echo no'; echo -ne "\033]0;$HOSTNAME\007"; sleep 1; set -u
"""
"""Half of a JSON object, three megabytes without a line break, bytes, a process that goes on printing, an alias, a title."""


def _other_software(lab: Lab, run: Run) -> None:
    lab.login_script(NOISE)
    metadata = next(file for file in files("transformers") or () if file.name == "METADATA").locate()
    lab.replace(2, Path(str(metadata)), "Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    lab.replace(2, ROOT / "dstrain/units.py", (ROOT / "dstrain/units.py").read_text() + "# changed\n")


REFUSALS = (
    Refusal("a host without a name in DNS", ("host1 slots=1", "host9 slots=1"), "host9"),
    Refusal("an address without a machine", ("host1 slots=1", "10.77.0.99 slots=1"), r"10\.77\.0\.99", within=45.0),
    Refusal("a host twice, by name", ("host1 slots=1", "", "host1 slots=2"), r"hostfile-\d+:3.*named twice"),
    Refusal("a host twice, by name and address", ("host2 slots=1", "10.77.0.12 slots=1"), r"host2.*10\.77\.0\.12|10\.77\.0\.12.*host2"),
    Refusal("the run folder is not shared", ("host1 slots=1", "host2 slots=1"), "host2: does not see .* share",
            before=lambda lab, run: lab.keep_apart(2, run.run_dir)),
    Refusal("other versions and other code; noisy login shells", ("host1 slots=1", "host2 slots=1"),
            r"host2: has transformers 4\.0\.0, host1 has .*\n.*host2: has other code of dstrain .*; install",
            before=_other_software),
    Refusal("the login shell ends with exit 1", ("host1 slots=1", "host2 slots=1"),
            "host2: its login shell or dstrain ended with code 1 before it answered .*bashrc",
            before=lambda lab, run: lab.login_script("[ $(hostname) = host1 ] || exit 1\n")),
)  # fmt: skip


def own_name_is_loopback(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """Hosts that call themselves 127.0.1.1, as Debian's installer writes it: it just works."""
    return _works("hosts call themselves 127.0.1.1", lab, folder, losses)


def noisy_login_shells(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """Whatever login scripts print, in whatever form: it just works."""
    lab.login_script(NOISE)
    return _works("noisy, slow, half-JSON login shells", lab, folder, losses)


def only_another_host(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """`--include host2` on host1 runs on host2, where DeepSpeed alone would run on host1."""
    more = ("--include", "host2")
    return _works("host1 starts, --include host2", lab, folder, losses, more=more, slots=2, runs_on=[2, 2])


def _works(what: str, lab: Lab, folder: Path, losses: Sequence[Any], more: Sequence[str] = (), slots: int = 1,
           runs_on: Sequence[int] = (1, 2)) -> Outcome:  # fmt: skip
    run, begin = _new(folder), time.monotonic()
    job = start(lab, run, hostfile=lab.hostfile(slots=slots), more=more)
    run.wait_for_step(job, 1)
    ran_on = [run.rank(rank)[0] for rank in (0, 1)]
    run.pace(None)
    outcome = judge(Fault(what, "start", lambda scene: None, 0, "^finished: ", within=START_SECONDS), lab, job, begin)
    elsewhere = [] if ran_on == list(runs_on) else [f"ran on {ran_on}"]
    return replace(outcome, wrong=(*outcome.wrong, *elsewhere, *differences(lab, run, losses)))


def one_of_two_jobs(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """SIGTERM to one of two jobs on the same hosts: it stops with a checkpoint, the other one does not notice."""
    folder.mkdir()
    stopped, other = _new(folder / "stopped"), _new(folder / "other")
    jobs = [start(lab, run) for run in (stopped, other)]
    for job, run in zip(jobs, (stopped, other), strict=True):
        run.wait_for_step(job, HARM_AT)
    begin = time.monotonic()
    jobs[0].signal(signal.SIGTERM)
    code = jobs[0].wait(30)
    seconds = time.monotonic() - begin
    lost = stopped.step() - stopped.saved()
    wrong = [] if (code, lost) == (75, 0) else [f"code {code}, {lost} steps lost:\n{jobs[0].output()[-4000:]}"]
    wait_for(lambda: not lab.find(2, str(stopped.run_dir)), 3.0, "something of the stopped job is left")
    other.pace(None)
    went_on = judge(Fault("", "", lambda scene: None, 0, "^finished: ", within=START_SECONDS), lab, jobs[1], begin)
    return Outcome(
        "SIGTERM to one of two jobs", "host1", round(seconds, 1), code, decisive(jobs[0].output()),
        "the other job", lost, (*wrong, *went_on.wrong, *differences(lab, other, losses)),
    )  # fmt: skip


def asked_before_it_began(lab: Lab, folder: Path, losses: Sequence[Any] = ()) -> Outcome:
    """SIGTERM while the processes still start: everything ends at once, as there is nothing to save."""
    run = _new(folder)
    job = start(lab, run)
    wait_for(lambda: lab.find(2, "dstrain"), START_SECONDS, "nothing was started on host2")
    time.sleep(1.0)
    begin = time.monotonic()
    job.signal(signal.SIGTERM)
    return judge(Fault("SIGTERM while it starts", "host1", lambda scene: None, 1, "^dstrain: "), lab, job, begin)


def rank_killed_without_ssh(lab: Lab, folder: Path, losses: Sequence[Any] = ()) -> Outcome:
    """Every host was given its own command; a rank is killed: each command ends with 1."""
    return _by_hand("SIGKILL of a rank, no ssh", lab, folder, signal.SIGKILL, 1)


def stopped_without_ssh(lab: Lab, folder: Path, losses: Sequence[Any] = ()) -> Outcome:
    """Every host was given its own command, and one of them gets SIGTERM: each ends with 75."""
    return _by_hand("SIGTERM to one command, no ssh", lab, folder, signal.SIGTERM, 75)


def _by_hand(what: str, lab: Lab, folder: Path, number: int, code: int) -> Outcome:
    run = _new(folder)
    first, second = start_by_hand(lab, run)
    run.wait_for_step(first, HARM_AT)
    begin = time.monotonic()
    if number == signal.SIGTERM:
        second.signal(number)
    else:
        lab.kill(*run.rank(1), number)
    ended = second.wait(60)
    wrong = [] if ended == code else [f"on host2 code {ended}:\n{second.output()[-4000:]}"]
    said = "" if code == 75 else "^dstrain: .*rank"
    outcome = judge(Fault(what, "host2", lambda scene: None, code, said), lab, first, begin)
    lost = run.step() - run.saved()
    if code == 75 and lost:
        wrong.append(f"{lost} steps lost")
    return replace(outcome, lost=lost, wrong=(*outcome.wrong, *wrong))


def _new(folder: Path) -> Run:
    return Run(folder, launch={"heartbeat_timeout_seconds": SILENCE})


Start = Callable[[Lab, Path, Sequence[Any]], Outcome]
STARTS: tuple[tuple[Start, Literal["plain", "debian"]], ...] = (
    (own_name_is_loopback, "debian"),
    (noisy_login_shells, "plain"),
    (only_another_host, "plain"),
    (one_of_two_jobs, "plain"),
    (asked_before_it_began, "plain"),
    (rank_killed_without_ssh, "plain"),
    (stopped_without_ssh, "plain"),
)
