"""Suspended, not dead, supervisors of a launch: the process that starts the ranks of a host, or `dstrain` itself."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.launch.worker import log_path
from tests.hosts.faults import HARM_AT, HOST_WORKER, SECRET, Fault, Outcome, differences, go_on, judge
from tests.hosts.lab import PATH, Lab, wait_for
from tests.hosts.running import SILENCE, Run, dstrain, start

RANK = r"-m dstrain\.cli train"
ALONE = ("--include", "host2")
"""Both ranks on host2 and none on host1, so that none ends because it lost another."""
ENDED = "^dstrain: the ssh session to host2 ended .*; rank 0, 1 ran there"


def host_worker_stopped(lab: Lab, folder: Path, losses: Sequence[Any], again: bool = True) -> Outcome:
    """The ranks see that nobody supervises them, and end their parent and themselves."""
    fault = Fault("SIGSTOP of the host worker", "host2", lambda scene: None, 1, ENDED, within=SILENCE + 8)
    run = Run(folder, launch={"heartbeat_timeout_seconds": SILENCE})
    outcome = _stop_host_worker(fault, lab, run)
    return _judged(outcome, fault, lab, run, losses) if again else outcome


def host_worker_stopped_and_no_ssh(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """The same where the host takes no new ssh session: none is needed."""
    fault = Fault(
        "SIGSTOP of the host worker, no new ssh session", "host2", lambda scene: None, 1, ENDED, within=SILENCE + 8
    )
    refuse = ["INPUT", "-p", "tcp", "--dport", "22", "--syn", "-j", "DROP"]

    def iptables(how: str) -> None:
        subprocess.run([*lab._within(2), "iptables", how, *refuse], check=True, env={"PATH": PATH})

    run = Run(folder, launch={"heartbeat_timeout_seconds": SILENCE})
    outcome = _stop_host_worker(fault, lab, run, lambda: iptables("-I"))
    iptables("-D")
    return _judged(outcome, fault, lab, run, losses)


def _stop_host_worker(fault: Fault, lab: Lab, run: Run, before: Callable[[], None] = lambda: None) -> Outcome:
    """Train, stop the host worker, and wait until `dstrain` and all ranks have ended."""
    job = start(lab, run, hostfile=lab.hostfile(slots=2), more=ALONE, env=SECRET)
    run.wait_for_step(job, HARM_AT)
    run.pace(1.0)  # 33 steps are left, more than anything here lasts
    before()
    stopped_at = time.monotonic()
    assert lab.kill(2, HOST_WORKER, signal.SIGSTOP)
    outcome = judge(fault, lab, job, stopped_at)
    # The first rank that ends says it; the other one may end before it does.
    said = any(f"has been stopped for {SILENCE:g} s" in log_path(run.run_dir, rank).read_text() for rank in (0, 1))
    return replace(outcome, wrong=(*outcome.wrong, *([] if said else ["no rank says why it ended"])))


def _judged(outcome: Outcome, fault: Fault, lab: Lab, run: Run, losses: Sequence[Any]) -> Outcome:
    """Whether nothing is left at last, and the same command goes on."""
    alive = lab.left(within=5.0)
    wrong = [*outcome.wrong, *([f"left: {alive}"] if alive else [])]
    lost = run.step() - run.saved()
    wrong += go_on(lab, run, fault)
    return replace(outcome, lost=lost, wrong=(*wrong, *differences(lab, run, losses)))


def dstrain_stopped(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """`dstrain` on host1, ranks on both hosts: the hosts hear nothing and end everything. Woken, it says why."""
    what = "SIGSTOP of dstrain, SIGCONT 15 s later"
    fault = Fault(
        what,
        "host1",
        lambda scene: None,
        1,
        "^dstrain: host1 heard nothing from the launching process for 6 s",
        within=22,
    )
    run = Run(folder, launch={"heartbeat_timeout_seconds": SILENCE})
    job = start(lab, run, env=SECRET)
    run.wait_for_step(job, HARM_AT)
    begin = time.monotonic()
    job.signal(signal.SIGSTOP)
    wait_for(
        lambda: not lab.find(2, "python") and not lab.find(1, RANK), 3 * SILENCE, "ranks outlive a stopped dstrain"
    )
    ended = time.monotonic() - begin
    time.sleep(max(0.0, 15 - ended))
    job.signal(signal.SIGCONT)
    outcome = judge(fault, lab, job, begin)
    outcome = replace(outcome, left=f"nothing {ended:.1f} s after the harm")
    return _judged(outcome, fault, lab, run, losses)


def dstrain_stopped_alone(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """On one host nobody gives the launch up: the ranks go on, and `dstrain` tells when it is woken, as after Ctrl-Z and fg."""
    run = Run(folder)
    job = lab.start(1, dstrain(run, "--num-gpus", "2"), cwd=run.folder, env={"DS_ACCELERATOR": "cpu"})
    run.wait_for_step(job, HARM_AT)
    begin = time.monotonic()
    job.signal(signal.SIGSTOP)
    run.pace(None)
    wait_for(lambda: not lab.find(1, RANK) or run.step() == 40, 60, "the ranks do not go on")
    time.sleep(3)
    job.signal(signal.SIGCONT)
    fault = Fault("SIGSTOP of dstrain, one host", "host1", lambda scene: None, 0, "^finished: ", within=60)
    outcome = judge(fault, lab, job, begin)
    return replace(outcome, lost=0, wrong=(*outcome.wrong, *differences(lab, run, losses)))


STOPPED = (host_worker_stopped, host_worker_stopped_and_no_ssh, dstrain_stopped, dstrain_stopped_alone)
