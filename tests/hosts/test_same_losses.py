"""Two hosts or one, with any launcher: same losses, same samples, same files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hosts.lab import Command, Lab
from tests.hosts.running import START_SECONDS, Run, start, start_by_hand

pytestmark = pytest.mark.hosts


def by_dstrain(lab: Lab, run: Run) -> list[Command]:
    return [start(lab, run)]


def deepspeed_alone(lab: Lab, run: Run) -> list[Command]:
    """DeepSpeed's own command with pdsh, which knows nothing of dstrain."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(lab.hostfile())]
    return [lab.start(1, [*command, "--module", "dstrain.cli", *run.arguments], cwd=run.folder)]


WAYS = {"dstrain": by_dstrain, "by hand": start_by_hand, "deepspeed alone, pdsh": deepspeed_alone}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "dstrain" else pytest.mark.slow) for way in WAYS])
def test_two_hosts_give_the_run_of_one(way: str, lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    run = Run(tmp_path / "job")
    run.pace(None)
    jobs = WAYS[way](lab, run)
    for job in jobs:
        code = job.wait(START_SECONDS)
        assert code == 0, job.output()[-6000:]
    assert lab.left(within=2.0) == []
    assert [run.rank(rank)[0] for rank in (0, 1)] == [1, 2], "a process on each host"
    assert run.losses() == unbroken.losses()
    assert run.seen() == unbroken.seen()
    of_launch = {f"logs/host-host{host}.log" for host in lab.numbers}
    assert run.files() - of_launch == unbroken.files()
    if way == "dstrain":
        assert "finished: " in jobs[0].output(), "rank 0's output comes to the terminal"
