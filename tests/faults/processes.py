"""SIGKILL and SIGSTOP of each process of a run, as a Markdown table: `python -m tests.faults.processes [--moments N]`."""

# A Python script calls `dstrain.train` with two ranks. At a random moment after the harmed process began, it gets the
# signal. `EXPECTED` says what must follow; `Chain.harm` checks it: nothing of the run is left after 30 s, and the next
# launch, which suffers the next harm, continues with the losses of a run without harm, to the bit. When a run is at its
# end, the next harm falls on a new one. A stopped rank is noticed after `timeout_minutes`, from which the 30 s count.

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from tests.hosts.running import Run
from tests.workers import ROOT

STEPS, SAVE_EVERY = 400, 7
PACE = 0.04
"""Seconds that a step takes in addition."""
LEFT_SECONDS = 30.0
"""Nothing of a run may be left later than this after a harm that ends it."""
TIMEOUT_SECONDS = 9.0
"""`timeout_minutes`: a stopped rank cannot be told from a slow one earlier."""
STARTS = 2.0
"""A harm comes at most so many times later than a start takes: half of them while it starts."""
MOST_ENCODING_SECONDS = 0.4
START_SECONDS = 120.0
"""Limit for a process to exist, or a step to be taken, on a busy machine."""
ENDED_BEFORE = "no harm: the run had ended"
SCRIPT = """
import json, sys
import dstrain
dstrain.train(sys.argv[1], run_dir=sys.argv[2], num_gpus=2, overrides=json.loads(sys.argv[3]))
"""

Role = Literal["script", "supervisor", "rank 0", "rank 1", "encoding process", "log copier"]
After = Literal["ends", "goes on", "waits"]
EXPECTED: dict[tuple[str, Role], After] = {
    ("SIGKILL", "script"): "ends",
    ("SIGKILL", "supervisor"): "ends",
    ("SIGKILL", "rank 0"): "ends",
    ("SIGKILL", "rank 1"): "ends",
    ("SIGKILL", "encoding process"): "ends",
    ("SIGKILL", "log copier"): "goes on",
    ("SIGSTOP", "script"): "goes on",
    ("SIGSTOP", "supervisor"): "goes on",
    ("SIGSTOP", "rank 0"): "ends",
    ("SIGSTOP", "rank 1"): "ends",
    ("SIGSTOP", "encoding process"): "waits",
    ("SIGSTOP", "log copier"): "goes on",
}
"""What the run does. `waits`: until SIGCONT, as it would for a slow process."""


@dataclass
class Outcome:
    """A row of the table."""

    signal: str
    role: Role
    moment: str
    happened: str = ""
    seconds: float = 0.0
    """From the harm, or from the SIGTERM after one that the run survives, until nothing was left."""
    wrong: list[str] = field(default_factory=list)


def find_processes(mark: str) -> dict[int, psutil.Process]:
    """Return the living processes of a run, by ID: they have the run's folder in their environment."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
    return found


def find_role(processes: dict[int, psutil.Process], script: int, role: Role) -> psutil.Process | None:
    """Return the process that has this part in the run; None if there is none yet."""
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            words, parent = " ".join(process.cmdline()), process.ppid()
            is_child_of_rank = "RANK" in process.environ() and "RANK" in psutil.Process(parent).environ()
            match role:
                case "script":
                    is_found = process.pid == script
                case "supervisor":
                    is_found = parent == script
                case "rank 0" | "rank 1":
                    is_found = process.environ().get("RANK") == role[-1] and not is_child_of_rank
                case "log copier":
                    is_found = "tee_log" in words
                case "encoding process":
                    is_found = is_child_of_rank and "tee_log" not in words
            if is_found:
                return process
    return None


def wait_for(holds: Callable[[], object], seconds: float) -> bool:
    """Wait until it holds; return False if it does not in time."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class Chain:
    """Runs that suffer one harm after another. `draw` chooses the moments."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self._root, self._draw, self._numbers = root, draw, itertools.count(1)
        self._script = root / "script.py"
        self._script.write_text(SCRIPT)
        healthy = self._new_run()
        healthy.pace(None)
        begin = time.monotonic()
        process = self._start(healthy, {})
        wait_for(lambda: healthy.step() > 0 or process.poll() is not None, START_SECONDS)
        self._most_seconds = STARTS * (time.monotonic() - begin)
        assert process.wait() == 0, self._said(healthy)
        self._losses = healthy.losses()
        self._run = self._new_run()

    def _new_run(self) -> Run:
        run = Run(
            self._root / f"run-{next(self._numbers)}", steps=STEPS, save={"every": SAVE_EVERY, "keep": 2},
            timeout_minutes=TIMEOUT_SECONDS / 60, eval={"every": 50},
        )  # fmt: skip
        run.pace(PACE)
        data = run.folder / "train.jsonl"
        data.write_text(data.read_text() * 100)  # enough for several encoding processes
        return run

    def _start(self, run: Run, overrides: dict[str, object]) -> subprocess.Popen[bytes]:
        words = [str(self._script), str(run.folder / "recipe.yaml"), str(run.run_dir), json.dumps(overrides)]
        env = {
            **os.environ,
            "MARK": str(run.folder),
            "DSTRAIN_CACHE": str(run.folder / "cache"),
            "DS_ACCELERATOR": "cpu",
        }
        with (run.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True
            )

    def _said(self, run: Run) -> str:
        return (run.folder / "said.txt").read_text(errors="replace")

    def harm(self, signal_name: str, role: Role) -> Outcome:
        """Start or resume the run, harm it, and judge."""
        run, background, steps_before = self._run, self._draw.random() < 0.5, self._run.step()
        delay = self._draw.random() * (MOST_ENCODING_SECONDS if role == "encoding process" else self._most_seconds)
        if role == "encoding process":
            shutil.rmtree(run.folder / "cache", ignore_errors=True)
        (run.folder / "said.txt").unlink(missing_ok=True)
        script = self._start(run, {"save.background": background})
        begin = time.monotonic()
        try:
            victim = self._wait_for_role(script, role, delay)
            is_training = "continuing from step" in self._said(run) or (steps_before == 0 and run.step() > 0)
            is_saving = any((run.run_dir / "checkpoints").glob("*.partial"))
            place = f"step {run.step()}" if is_training else "start"
            moment = f"{place}{', saving' * is_saving}, {time.monotonic() - begin:.1f} s"
            outcome = Outcome(signal_name, role, moment)
            if victim is None or script.poll() is not None:
                outcome.happened = ENDED_BEFORE
                outcome.wrong += self._judge_end(script, {0})
            else:
                victim.send_signal(getattr(signal, signal_name))
                self._judge(outcome, script, victim, is_training)
        finally:
            self._end_all(run)
            script.wait()
        losses = run.losses()
        if losses != self._losses[: len(losses)]:
            outcome.wrong.append("other losses than those of a run without harm")
        if run.step() == run.saved() == STEPS:
            shutil.rmtree(run.folder)
            self._run = self._new_run()
        return outcome

    def _wait_for_role(self, script: subprocess.Popen[bytes], role: Role, delay: float) -> psutil.Process | None:
        """Return the process with this role when it has existed for so long; None if the script ends before."""
        until = time.monotonic() + START_SECONDS
        while script.poll() is None and time.monotonic() < until:
            process = find_role(find_processes(str(self._run.folder)), script.pid, role)
            if process is not None:
                time.sleep(delay)
                # Not again the same: a forked process may have become the log copier meanwhile, or have ended.
                if process == find_role({process.pid: process}, script.pid, role):
                    return process
                delay = 0.0
            time.sleep(0.02)
        return None

    def _judge(
        self, outcome: Outcome, script: subprocess.Popen[bytes], victim: psutil.Process, is_training: bool
    ) -> None:
        """Check what the harm led to, and that nothing is left."""
        run, after = self._run, EXPECTED[outcome.signal, outcome.role]
        begin = time.monotonic()
        if after == "ends":
            codes = {-signal.SIGKILL} if outcome.role == "script" else {1}
            if run.step() == STEPS:  # a rank that has recorded its end may be killed without harm
                codes.add(0)
            outcome.wrong += self._judge_end(script, codes, TIMEOUT_SECONDS if outcome.signal == "SIGSTOP" else 0.0)
            outcome.happened = f"ended with {script.poll()}: {self._last_line()}"
        else:
            if after == "waits":
                time.sleep(2.0)
            elif not self._goes_on(script):
                outcome.wrong.append("it did not go on")
            if outcome.signal == "SIGSTOP" and outcome.role != "log copier":
                victim.send_signal(signal.SIGCONT)
            if not self._goes_on(script):
                outcome.wrong.append("it did not go on after SIGCONT")
            begin = time.monotonic()
            script.terminate()
            outcome.wrong += self._judge_end(script, {75, 0})
            outcome.happened = f"{after}; SIGTERM then ended it with {script.poll()}"
        outcome.seconds = round(time.monotonic() - begin, 1)
        if outcome.signal == "SIGKILL" and outcome.role == "script" and is_training and run.saved() < run.step():
            outcome.wrong.append(f"step {run.step()} was taken, and {run.saved()} is the newest checkpoint")

    def _goes_on(self, script: subprocess.Popen[bytes]) -> bool:
        """Wait until two more rows are written, or the run is at its end; return False if neither happens."""
        size = self._metrics_size()

        def holds() -> bool:
            is_at_end = script.poll() is not None or self._run.step() == STEPS
            return is_at_end or self._metrics_size() > size + 400

        return wait_for(holds, START_SECONDS)

    def _metrics_size(self) -> int:
        path = self._run.run_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def _judge_end(self, script: subprocess.Popen[bytes], codes: set[int], noticed_after: float = 0.0) -> Iterator[str]:
        mark = str(self._run.folder)
        limit = LEFT_SECONDS + noticed_after
        if not wait_for(lambda: script.poll() is not None and not find_processes(mark), limit):
            left = [" ".join(process.cmdline())[-80:] for process in find_processes(mark).values()]
            yield f"left after {limit:g} s: {left}; script: {script.poll()}"
        elif script.poll() not in codes:
            yield f"exit code {script.poll()}: {self._said(self._run)[-500:]}"

    def _last_line(self) -> str:
        """Return the last error that was said, else the last line."""
        lines = [line for line in self._said(self._run).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("dstrain: ", "error: "))]
        return next(iter([*errors[-1:], *lines[-1:]]), "nothing was said")

    def _end_all(self, run: Run) -> None:
        for process in find_processes(str(run.folder)).values():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def finish(self) -> list[str]:
        """Resume the last run to its end. Returns what is wrong with it."""
        self._run.pace(None)
        (self._run.folder / "said.txt").unlink(missing_ok=True)
        script = self._start(self._run, {})
        code = script.wait()
        is_equal = self._run.losses() == self._losses
        return ([] if code == 0 else [self._said(self._run)[-1000:]]) + (
            [] if is_equal else ["other losses at the end"]
        )


def choose_harms(moments: int, draw: random.Random) -> list[tuple[str, Role]]:
    """Return the harms in their order: each kind as often as any other."""
    harms: list[tuple[str, Role]] = []
    while len(harms) < moments:
        kinds = list(EXPECTED)
        draw.shuffle(kinds)
        harms += kinds
    return harms[:moments]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each harm. Returns 1 if one did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has started is ended
    draw, broken = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        chain = Chain(Path(folder), draw)
        print("| signal | process | moment | the run | nothing left after s | held |\n|" + "---|" * 6, flush=True)
        for signal_name, role in choose_harms(options.moments, draw):
            outcome = chain.harm(signal_name, role)
            if outcome.happened == ENDED_BEFORE and not outcome.wrong:  # a new run began
                outcome = chain.harm(signal_name, role)
            broken += bool(outcome.wrong)
            cells = (
                signal_name,
                role,
                outcome.moment,
                outcome.happened,
                outcome.seconds,
                "; ".join(outcome.wrong) or "yes",
            )
            print(
                "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |", flush=True
            )
        wrong = chain.finish()
        broken += bool(wrong)
        print(f"\nresumed to the end: {'; '.join(wrong) or 'with equal losses'}; {broken} did not hold")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
