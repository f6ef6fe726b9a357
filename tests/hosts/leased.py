"""Two launches into one run folder, from two hosts that share it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.launch.lease import LEASE_TIMEOUT_SECONDS
from tests.hosts.faults import HARM_AT, Fault, Outcome, decisive, differences, judge
from tests.hosts.lab import Lab, wait_for
from tests.hosts.running import SILENCE, START_SECONDS, Run, dstrain, start

OURS = "dstrain|deepspeed"
HERE = ("--num-gpus", "2")
"""A launch on the host where it is started."""


def started_twice(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """The same command from another host, while the first one trains: it ends before anything is touched."""
    run = Run(folder, launch={"heartbeat_timeout_seconds": SILENCE})
    job = start(lab, run)
    run.wait_for_step(job, 1)
    begin = time.monotonic()
    second = lab.start(2, dstrain(run, "--hostfile", str(lab.hostfile())), cwd=run.folder)
    code, seconds = second.wait(60), time.monotonic() - begin
    said = decisive(second.output())
    wrong = (
        [] if code == 2 and "another launch writes into it (process " in said else [f"code {code}: {second.output()}"]
    )
    run.pace(None)
    first = judge(Fault("", "", lambda scene: None, 0, "^finished: ", within=START_SECONDS), lab, job, begin)
    wrong += [*first.wrong, *differences(lab, run, losses)]
    return Outcome(
        "a second start from another host", "host2", round(seconds, 1), code, said, first.left, 0,
        tuple(wrong),
    )  # fmt: skip


def taken_over(lab: Lab, folder: Path, losses: Sequence[Any]) -> Outcome:
    """A launch stands still, another host takes the run over, and the first wakes up: it ends and writes nothing more."""
    run = Run(folder, launch={"heartbeat_timeout_seconds": SILENCE})
    said = "^dstrain: another launch took .* over"
    fault = Fault("the launch stands still, another host goes on, it wakes up", "host1", lambda scene: None, 1, said,
                  within=SILENCE, but=str(run.folder))  # fmt: skip
    with contextlib.ExitStack() as jobs:
        job = lab.start(1, dstrain(run, *HERE), cwd=run.folder)
        jobs.callback(job.end)
        run.wait_for_step(job, HARM_AT)
        assert lab.kill(1, OURS, signal.SIGSTOP)
        begin = time.monotonic()
        second = lab.start(2, dstrain(run, *HERE), cwd=run.folder)
        jobs.callback(second.end)
        jobs.callback(lambda: lab.kill(1, OURS, signal.SIGCONT))
        wait_for(lambda: "continuing from step" in second.output(), START_SECONDS, "the second launch does not begin")
        took = time.monotonic() - begin
        lab.kill(1, OURS, signal.SIGCONT)
        job.signal(signal.SIGCONT)
        outcome = judge(fault, lab, job, time.monotonic())
        run.pace(None)
        wrong = [*outcome.wrong]
        if (code := second.wait(START_SECONDS)) != 0:
            wrong.append(f"the second ended with {code}:\n{second.output()[-4000:]}")
    if took < LEASE_TIMEOUT_SECONDS:
        wrong.append(f"taken over after {took:.1f} s already")
    return replace(outcome, wrong=(*wrong, *differences(lab, run, losses)))
