"""tests/faults/test_silence.py over NCCL: the host does not stay in a collective, it waits for the GPU behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.launch.worker import log_path
from tests.faults.test_silence import HOST, launched
from tests.gpu.workers import REHEARSAL

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if REHEARSAL:
        return
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of two ranks")
    monkeypatch.setenv("RANK_FAULT_GPU", "1")


@pytest.mark.parametrize("fault", ["hang", "skip"])
def test_a_rank_that_hangs_is_named_before_nccl_ends_the_others(fault: str, tmp_path: Path) -> None:
    """NCCL's own watchdog aborts a rank when the time is up, and asks nobody: the name has to be there before."""
    with launched(tmp_path, fault, timeout=20.0) as processes:
        assert processes[0].wait(timeout=120) != 0
    log = log_path(tmp_path, 0).read_text()
    assert f"stalled: step 3: rank 1 on {HOST} did not enter all_reduce no. " in log
    assert "hang_here" in (tmp_path / "logs/stacks/rank-00001.txt").read_text()


def test_a_killed_rank_is_named_before_nccl_ends_the_others(tmp_path: Path) -> None:
    with launched(tmp_path, "SIGKILL", timeout=20.0) as processes:
        assert processes[0].wait(timeout=120) != 0
    assert f"rank 1 on {HOST} has ended without a report" in log_path(tmp_path, 0).read_text()
