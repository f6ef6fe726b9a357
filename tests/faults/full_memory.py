"""Runs in a cgroup whose memory gets full, as a Markdown table: `python -m tests.faults.full_memory`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dstrain.units import format_bytes
from tests.hosts.running import Run, dstrain
from tests.vocabulary import find_processes

MIB = 1 << 20
STEPS = 30
LEAK = """
import os
from dataclasses import dataclass
from pathlib import Path
from tests.hosts.slowly import Slowly

kept = []

@dataclass(frozen=True, kw_only=True)
class Leaking(Slowly):
    def loss(self, model, batch):
        if model.training and os.environ["RANK"] == "1" and (Path(self.folder) / "leak").exists():
            kept.append(b"x" * (100 << 20))
        return super().loss(model, batch)
"""


@contextmanager
def limited_cgroup(limit: int) -> Iterator[Path]:
    """Context with a cgroup, of version 1 or 2, that has so many bytes. Raises OSError where none can be made."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory").is_dir()
    group = root / ("memory" if is_v1 else "") / f"dstrain-full-memory-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        yield group
    finally:
        until = time.monotonic() + 20
        while group.exists() and time.monotonic() < until:
            try:
                group.rmdir()
            except OSError:  # busy for a moment after its last process has ended
                time.sleep(0.1)


def train(run: Run, limit: int | None) -> tuple[int, str]:
    """Train with two processes; return exit code and output. `limit`: bytes of the launch with its ranks."""
    command = dstrain(run, "--num-gpus", "2")
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    if limit is None:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr
    with limited_cgroup(limit) as group:
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        done = subprocess.run([*enter, *command], env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


def make_run(folder: Path) -> Run:
    """Return a run whose rank 1 needs 100 MiB more in each step as long as the file `leak` is there."""
    folder.mkdir()
    task = folder / "leaking.py"
    task.write_text(LEAK)
    run = Run(folder / "job", task=str(task), steps=STEPS, timeout_minutes=0.25)
    run.pace(None)
    return run


def main() -> int:
    """Print a row for each. Returns 1 if one did not end as it must."""
    broken = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        healthy = make_run(root / "healthy")
        code, output = train(healthy, None)
        assert code == 0, output
        print(
            "| memory of the cgroup | what fills it | exit code | said | resumed | held |\n|" + "---|" * 6, flush=True
        )
        for what, limit, leaks in (("the start", 600 * MIB, False), ("rank 1, in training", 2400 * MIB, True)):
            run = make_run(root / what.replace(" ", "-"))
            if leaks:
                (run.folder / "leak").touch()
            code, output = train(run, limit)
            said = [line for line in output.splitlines() if line.startswith("dstrain: ")]
            wrong = [] if code == 1 and said and "memory" in said[-1] else [f"exit code {code}: {output[-1500:]}"]
            if find_processes(run.folder):
                wrong.append("a process is left")
            step = run.saved()
            (run.folder / "leak").unlink(missing_ok=True)
            code, output = train(run, None)
            if code != 0 or run.losses() != healthy.losses():
                wrong.append(f"resumed with exit code {code}, or with other losses: {output[-1000:]}")
            broken += bool(wrong)
            cells = (
                format_bytes(limit),
                what,
                1,
                said[-1] if said else "nothing",
                f"from step {step}",
                "; ".join(wrong) or "yes",
            )
            print("| " + " | ".join(str(cell).replace("\n", " ") for cell in cells) + " |", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
