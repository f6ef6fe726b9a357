"""Real training run on the hosts of a lab: started, waited for, and observed from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dstrain.launch.worker import get_workers_dir
from dstrain.training.state.manifest import find_checkpoints
from tests.hosts.lab import Command, Lab
from tests.tiny import tiny_recipe

STEPS, SAVE_EVERY = 40, 5
PACE = 0.15
"""Seconds a step takes until harm is done."""
SILENCE = 6.0
"""launch.heartbeat_timeout_seconds of these runs."""
TIMEOUT_MINUTES = 0.25
START_SECONDS = 120.0
"""For all processes to import deepspeed on a busy machine, and some steps."""


class Run:
    """A recipe with its data and its run folder in a new folder, which all hosts share."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        """`changes`: keys of the recipe."""
        folder.mkdir(parents=True)
        self.folder, self.run_dir = folder, folder / "run"
        recipe: dict[str, Any] = {
            **tiny_recipe("rm", folder),
            "task": str(Path(__file__).with_name("slowly.py")),
            "options": {"folder": str(folder)},
            "steps": STEPS,
            "save": {"every": SAVE_EVERY},
            "timeout_minutes": TIMEOUT_MINUTES,
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
        self.pace(PACE)

    def pace(self, seconds: float | None) -> None:
        """How long a step takes from now on; None: as long as it needs."""
        path = self.folder / "pace"
        if seconds is None:
            path.unlink(missing_ok=True)
        else:
            (self.folder / "pace.new").write_text(str(seconds))
            (self.folder / "pace.new").replace(path)

    @property
    def arguments(self) -> list[str]:
        """Of `dstrain`, without launch options."""
        return ["train", str(self.folder / "recipe.yaml"), "--run-dir", str(self.run_dir)]

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, those that are whole."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def losses(self) -> list[tuple[int, str, float, float | None]]:
        """(step, split, loss, gradient norm) of every row."""
        return [(row["step"], row["split"], row["loss"], row.get("grad_norm")) for row in self.rows()]

    def seen(self) -> dict[str, list[str]]:
        """The samples of each micro-batch, by rank."""
        return {path.name: path.read_text().splitlines() for path in sorted(self.folder.glob("seen-*"))}

    def files(self) -> set[str]:
        """The files of the run folder, but for those whose names are made up anew by every run."""
        names = {path.relative_to(self.run_dir).as_posix() for path in self.run_dir.rglob("*") if path.is_file()}
        return {name for name in names if not name.startswith((".workers", "events.out"))}

    def step(self) -> int:
        """The last one that was logged."""
        return max((row["step"] for row in self.rows()), default=0)

    def saved(self) -> int:
        """Step of the newest whole checkpoint; 0 where there is none."""
        return max(
            (
                info.step
                for info in find_checkpoints(self.run_dir / "checkpoints", check_hashes=True)
                if info.is_complete
            ),
            default=0,
        )

    def wait_for_step(self, job: Command, step: int) -> None:
        """Until the step is logged. Raises AssertionError with what the job said where it ends before."""
        end = time.monotonic() + START_SECONDS
        while self.step() < step:
            assert job.code is None, f"ended with {job.code} before step {step}:\n{job.output()[-4000:]}"
            assert time.monotonic() < end, f"no step {step} within {START_SECONDS:g} s:\n{job.output()[-4000:]}"
            time.sleep(0.05)

    def rank(self, rank: int) -> tuple[int, int]:
        """(host, process id on the host) of a rank."""
        (path,) = get_workers_dir(self.run_dir).glob(
            f"rank-{rank:05d}*.json"
        )  # an earlier launch's are removed at a start
        record = json.loads(path.read_text())
        return int(record["host"].removeprefix("host")), record["pid"]


def dstrain(run: Run, *options: str) -> list[str]:
    """The command line of `dstrain train` for a run, with launch options."""
    return [sys.executable, "-m", "dstrain", *run.arguments, *options]


def start(lab: Lab, run: Run, hostfile: Path | None = None, more: Sequence[str] = (),
          env: Mapping[str, str] | None = None) -> Command:  # fmt: skip
    """`dstrain train --hostfile` on host1, over all hosts if `hostfile` does not say otherwise."""
    options = ["--hostfile", str(hostfile or lab.hostfile()), *more]
    return lab.start(1, dstrain(run, *options), env=env, cwd=run.folder)


def start_by_hand(lab: Lab, run: Run) -> list[Command]:
    """A command for each host, and no ssh."""
    options = ["--hostfile", str(lab.hostfile()), "--no-ssh", "--master-addr", "host1"]
    return [
        lab.start(host, dstrain(run, *options, "--node-rank", str(host - 1)), cwd=run.folder) for host in lab.numbers
    ]


def unbroken(folder: Path) -> Run:
    """The run that nothing happened to: two processes on this machine."""

    run = Run(folder)
    run.pace(None)
    done = subprocess.run(
        dstrain(run, "--num-gpus", "2"),
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return run


def print_rows(
    rows: Sequence[Callable[..., Any]], missing: str | None, lab: Callable[[Path], Any], columns: Sequence[str],
    to_cells: Callable[[Any], Sequence[Any]],
) -> None:  # fmt: skip
    """Print a Markdown table, with a row for each function, or for those that the command line names.

    Each gets a lab, a folder and the losses of the run that nothing happened to. What does not hold goes to stderr, and
    the others follow; the exit code is 1 then. `missing`: what is not installed.
    """
    if missing:
        sys.exit(missing)
    wanted, broken = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as path:
        root = Path(path)
        losses = unbroken(root / "unbroken").losses()
        print(f"| {' | '.join(columns)} |\n|" + "---|" * len(columns))
        for make in rows:
            if wanted and make.__name__ not in wanted:
                continue
            try:
                with lab(root / f"lab-{make.__name__}") as hosts:
                    row = make(hosts, root / make.__name__, losses)
            except Exception as error:
                broken.append(make.__name__)
                print(f"{make.__name__}: {type(error).__name__}: {error}\n", file=sys.stderr, flush=True)
                continue
            if row.wrong:
                broken.append(make.__name__)
                print(f"{row.what}: {'; '.join(row.wrong)}\n", file=sys.stderr, flush=True)
            print("| " + " | ".join(map(str, to_cells(row))) + " |", flush=True)
    print(f"\n{len(broken)} did not hold: {', '.join(broken) or 'none'}")
    sys.exit(bool(broken))
