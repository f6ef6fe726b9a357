"""Two hosts or one, with any launcher: same losses, same samples, same files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hosts.faults import HARM_AT
from tests.hosts.lab import PATH, Command, Lab
from tests.hosts.running import START_SECONDS, Run, start, start_by_hand
from tests.workers import ROOT

pytestmark = pytest.mark.hosts


def by_dstrain(lab: Lab, run: Run) -> list[Command]:
    return [start(lab, run)]


def deepspeed_alone(lab: Lab, run: Run) -> list[Command]:
    """DeepSpeed's own command with pdsh, which knows nothing of dstrain."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(lab.hostfile())]
    return [lab.start(1, [*command, "--module", "dstrain.cli", *run.arguments], cwd=run.folder)]


def deepspeed_m(lab: Lab, run: Run) -> list[Command]:
    """The same with `-m`, by the script in launchers/."""
    command = [str(ROOT / "launchers/deepspeed"), "--hostfile", str(lab.hostfile()), "-m", "dstrain.cli"]
    path = f"{ROOT}/launchers:{Path(sys.executable).parent}:{PATH}"
    return [lab.start(1, [*command, *run.arguments], env={"PATH": path}, cwd=run.folder)]


def torchrun(lab: Lab, run: Run) -> list[Command]:
    """A command on each host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "host1", "--master-port", "29500"]
    return [
        lab.start(host, [*command, "--node-rank", str(host - 1), "-m", "dstrain.cli", *run.arguments], cwd=run.folder)
        for host in lab.numbers
    ]


WAYS = {
    "dstrain": by_dstrain,
    "by hand": start_by_hand,
    "deepspeed alone, pdsh": deepspeed_alone,
    "deepspeed -m, pdsh": deepspeed_m,
    "torchrun": torchrun,
}


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


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_ends_the_run_and_the_same_command_continues_it(
    way: str, lab: Lab, tmp_path: Path, unbroken: Run
) -> None:
    run = Run(tmp_path / "job")
    jobs = WAYS[way](lab, run)
    run.wait_for_step(jobs[0], HARM_AT)
    assert lab.kill(*run.rank(1))
    codes = [job.wait(60) for job in jobs]
    if way in ("dstrain", "by hand", "torchrun"):
        assert set(codes) == {1}
    assert 0 not in codes
    assert lab.left(within=10.0) == []
    assert run.saved() == 5
    run.pace(None)
    assert [job.wait(START_SECONDS) for job in WAYS[way](lab, run)] == [0] * len(jobs)
    assert run.losses() == unbroken.losses()
