"""Hosts whose own name is loopback, as Debian's installer sets it up, under a launcher other than dstrain's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.lab import Lab
from tests.hosts.running import START_SECONDS, Run

pytestmark = pytest.mark.hosts


@pytest.mark.slow  # torchrun on two hosts: test_elastic
def test_torchrun_alone_meets_over_the_network(make_lab: Callable[..., Lab], tmp_path: Path, unbroken: Run) -> None:
    """host1 is MASTER_ADDR, and on host1 that name is 127.0.1.1; nothing says GLOO_SOCKET_IFNAME."""
    lab = make_lab(style="debian")
    run = Run(tmp_path / "job")
    run.pace(None)
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "host1", "--master-port", "29511"]
    torchrun, module = [sys.executable, "-m", "torch.distributed.run", *meet], ["-m", "dstrain.cli", *run.arguments]
    jobs = [lab.start(host, [*torchrun, "--node-rank", str(host - 1), *module], cwd=run.folder) for host in lab.numbers]
    for job in jobs:
        assert job.wait(START_SECONDS) == 0, job.output()[-6000:]
    assert run.losses() == unbroken.losses()
    assert lab.left(within=2.0) == []
