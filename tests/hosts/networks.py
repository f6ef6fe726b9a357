"""A run on two hosts over other networks, as a Markdown table: `python -m tests.hosts.networks [NAME...]`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.lab import Lab, missing
from tests.hosts.running import Run, print_rows, start

MOST_SECONDS = 400.0
"""Limit for a run, on a busy machine."""


@dataclass(frozen=True)
class Network:
    """A row of the table."""

    what: str
    code: int
    seconds: float
    said: str
    wrong: tuple[str, ...] = ()


def train(what: str, lab: Lab, folder: Path, losses: Sequence[Any]) -> Network:
    """Train on both hosts to the end; the losses must be those of a run on one host."""
    run = Run(folder, timeout_minutes=1.0)
    run.pace(None)
    begin = time.monotonic()
    job = start(lab, run)
    try:
        job.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return Network(what, -1, MOST_SECONDS, job.output()[-300:], ("it does not end",))
    lines = [line for line in job.output().splitlines() if line.startswith(("error: ", "dstrain: ", "finished: "))]
    wrong = []
    if job.code != 0:
        wrong.append(f"exit code {job.code}: {job.output()[-1000:]}")
    elif run.losses() != list(losses):
        wrong.append("other losses than on one host")
    if alive := lab.left(within=5.0):
        wrong.append(f"left: {alive}")
    return Network(what, job.code or 0, round(time.monotonic() - begin, 1), (lines or ["nothing"])[-1], tuple(wrong))


def _slow(what: str, seconds: float, loss: float) -> Callable[..., Network]:
    def row(lab: Lab, folder: Path, losses: Sequence[Any]) -> Network:
        lab.slow_down(seconds, loss)
        return train(what, lab, folder, losses)

    row.__name__ = f"delay_{round(1000 * seconds)}_loss_{round(100 * loss)}"
    return row


def plain(lab: Lab, folder: Path, losses: Sequence[Any]) -> Network:
    return train("a cable", lab, folder, losses)


def ipv6_only(lab: Lab, folder: Path, losses: Sequence[Any]) -> Network:
    return train("IPv6 addresses only", lab, folder, losses)


ROWS = (
    plain,
    ipv6_only,
    _slow("20 ms each way, 1 % loss", 0.02, 0.01),
    _slow("20 ms each way, 5 % loss", 0.02, 0.05),
    _slow("100 ms each way", 0.1, 0.0),
)


def main() -> None:
    def make_lab(folder: Path) -> Any:
        return Lab(folder, style="ipv6" if "ipv6" in folder.name else "plain")

    columns = ("network", "exit code", "s", "said")
    print_rows(ROWS, missing(), make_lab, columns, lambda row: (row.what, row.code, row.seconds, row.said))


if __name__ == "__main__":
    main()
