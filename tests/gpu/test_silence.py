"""tests/faults/test_silence.py over NCCL: the host does not stay in a collective, it waits for the GPU behind it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dstrain.launch.worker import log_path
from tests.faults import test_silence
from tests.faults.test_silence import HOST, launched
from tests.forked import Forked
from tests.gpu.workers import IS_EMULATED, REHEARSAL
from tests.vocabulary import wait_until
from tests.workers import ROOT

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if REHEARSAL:
        return
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of two ranks")
    monkeypatch.setenv("RANK_FAULT_GPU", "1")
    # deepspeed asks for devices when it is imported: no process that is forked afterwards can use CUDA.
    monkeypatch.setattr(test_silence, "start_origins", lambda: None)
    monkeypatch.setattr(test_silence, "fork", start)


def start(
    rank: int, function: str, folder: Path, fault: str, *, env: Mapping[str, str], quiet: bool
) -> subprocess.Popen[bytes]:
    """Start a rank in a new process. Its arguments are those of tests.forked.fork."""
    output = subprocess.DEVNULL if quiet else None
    module = function.partition(":")[0]
    command = [sys.executable, "-m", module, str(folder), fault]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=output)


def check_end(process: Forked, log: Path, line: str) -> None:
    """Wait until a rank has ended with a line in its log. The emulated NCCL ends no rank: there the line is enough."""
    if IS_EMULATED:
        wait_until(lambda: log.exists() and line in log.read_text())
        return
    assert process.wait(timeout=120) != 0
    assert line in log.read_text()


@pytest.mark.parametrize("fault", ["hang", "skip"])
def test_a_rank_that_hangs_is_named_before_nccl_ends_the_others(fault: str, tmp_path: Path) -> None:
    """NCCL's own watchdog aborts a rank when the time is up, and asks nobody: the name has to be there before."""
    with launched(tmp_path, fault, timeout=20.0) as processes:
        line = f"stalled: step 3: rank 1 on {HOST} did not enter all_reduce no. "
        check_end(processes[0], log_path(tmp_path, 0), line)
    assert "hang_here" in (tmp_path / "logs/stacks/rank-00001.txt").read_text()


def test_a_killed_rank_is_named_before_nccl_ends_the_others(tmp_path: Path) -> None:
    with launched(tmp_path, "SIGKILL", timeout=20.0) as processes:
        check_end(processes[0], log_path(tmp_path, 0), f"rank 1 on {HOST} went silent")
