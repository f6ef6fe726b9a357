"""Data is prepared before any process group: a slow rank is waited for, one that fails or is killed is named.

Threads stand for the ranks in tests/unit/training/test_rendezvous.py, which has the other faults.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path

import pytest

from dstrain.launch.worker import log_path
from tests.faults.test_silence import start_ranks
from tests.forked import Forked

RANK = "tests.faults.rank_preparing_data"
HOST = socket.gethostname()


def launched(folder: Path, fault: str, timeout: float = 4.0) -> contextlib.AbstractContextManager[list[Forked]]:
    """Two ranks of a launch, each with a cache of its own, as on two hosts."""
    caches = [str(folder / f"cache-{rank}") for rank in range(2)]
    return start_ranks(f"{RANK}:main", folder, fault, timeout=timeout, caches=caches)


def ended(folder: Path, fault: str, timeout: float = 4.0) -> list[tuple[int | None, str]]:
    """Each rank's exit code and last line."""
    with launched(folder, fault, timeout) as processes:
        codes: list[int | None] = [process.wait(timeout=60) for process in processes]
    logs = [log_path(folder, rank).read_text() for rank in range(2)]
    return list(zip(codes, [log.splitlines()[-1] if log else "" for log in logs], strict=True))


@pytest.mark.slow
def test_a_host_that_prepares_longer_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    assert ended(tmp_path, "slow", timeout=3.0) == [(0, ""), (0, "")]


@pytest.mark.parametrize("fault", ["bad", "bad on 0"])
def test_bad_data_on_one_host_ends_all_with_2(fault: str, tmp_path: Path) -> None:
    bad = 0 if fault == "bad on 0" else 1
    told = ended(tmp_path, fault, timeout=60.0)
    assert told[bad] == (2, "error: train.jsonl:7: is bad; mend it")
    assert told[1 - bad] == (2, f"error: rank {bad} on {HOST} failed: train.jsonl:7: is bad; mend it")


@pytest.mark.slow
def test_where_rank_0_is_killed_the_others_do_not_wait(tmp_path: Path) -> None:
    with launched(tmp_path, "slow", timeout=2.0) as processes:
        while not (tmp_path / "began-1").exists():
            assert processes[1].poll() is None
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGKILL)
        assert processes[1].wait(timeout=60) == 1
    assert "error: preparing the data: rank 0 at 127.0.0.1:" in log_path(tmp_path, 1).read_text().splitlines()[-1]


def test_a_fork_while_the_heartbeat_beats_is_harmless(tmp_path: Path) -> None:
    assert ended(tmp_path, "fork") == [(0, ""), (0, "")]
