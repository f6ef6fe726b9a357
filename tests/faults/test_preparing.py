"""Data is prepared before any process group: a slow rank is waited for, one that fails or falls silent is named."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrain.launch.command import free_port
from dstrain.launch.worker import log_path, read_rank_records
from tests.forked import Forked, fork, start_origins

RANK = "tests.faults.rank_preparing_data"
HOST = socket.gethostname()


@contextlib.contextmanager
def launched(
    folder: Path, fault: str, timeout: float = 4.0, apart: bool = True, ranks: int = 2
) -> Iterator[list[Forked]]:
    """Ranks of a launch, each with a cache of its own where they are `apart`, as on hosts; none is left behind."""
    start_origins()
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    env |= {"OMP_NUM_THREADS": "1", "RANK_FAULT_TIMEOUT": str(timeout), "DSTRAIN_CACHE": str(folder / "cache")}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"DSTRAIN_CACHE": str(folder / f"cache-{rank}")} if apart else {}
        processes.append(fork(rank, f"{RANK}:main", folder, fault, env=env | own, quiet=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(folder: Path, fault: str, timeout: float = 4.0, apart: bool = True) -> list[tuple[int | None, str]]:
    """Each rank's exit code and last line."""
    with launched(folder, fault, timeout, apart) as processes:
        codes: list[int | None] = [process.wait(timeout=60) for process in processes]
    logs = [log_path(folder, rank).read_text() for rank in range(2)]
    return list(zip(codes, [log.splitlines()[-1] if log else "" for log in logs], strict=True))


def test_a_host_that_prepares_longer_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    assert ended(tmp_path, "slow", timeout=3.0) == [(0, ""), (0, "")]


def test_of_ranks_that_share_a_cache_one_prepares_first(tmp_path: Path) -> None:
    with launched(tmp_path, "none", apart=False, ranks=3) as processes:
        assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    ends, begins = (
        [float((tmp_path / f"{what}-{rank}").read_text()) for rank in range(3)] for what in ("ended", "began")
    )
    assert ends[0] <= min(begins[1:])


@pytest.mark.parametrize("fault", ["bad", "bad on 0"])
def test_bad_data_on_one_host_ends_all_with_2(fault: str, tmp_path: Path) -> None:
    bad = 0 if fault == "bad on 0" else 1
    told = ended(tmp_path, fault, timeout=60.0)
    assert told[bad] == (2, "error: train.jsonl:7: is bad; mend it")
    assert told[1 - bad] == (2, f"error: rank {bad} on {HOST} failed: train.jsonl:7: is bad; mend it")


@pytest.mark.parametrize("apart", [True, False])
def test_bad_data_on_all_hosts_ends_all_with_2(apart: bool, tmp_path: Path) -> None:
    for code, line in ended(tmp_path, "bad on all", timeout=60.0, apart=apart):
        assert code == 2
        assert line.endswith("train.jsonl:7: is bad; mend it")


@pytest.mark.slow
def test_an_error_of_its_own_is_told_by_the_others(tmp_path: Path) -> None:
    told = ended(tmp_path, "broken", timeout=60.0)
    assert [code for code, _ in told] == [1, 1]
    assert told[0][1].startswith(f"error: preparing the data: rank 1 on {HOST} failed: ValueError: of its own; fix")
    assert "ValueError: of its own" in log_path(tmp_path, 1).read_text()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("SIGSTOP", "SIGKILL")])
def test_a_rank_whose_heartbeat_stands_still_is_named(kind: str, tmp_path: Path) -> None:
    with launched(tmp_path, kind, timeout=2.0) as processes:
        assert processes[0].wait(timeout=60) == 1
    assert log_path(tmp_path, 0).read_text().splitlines()[-1] == (
        f"error: preparing the data: rank 1 on {HOST} sent no heartbeat for 2 s (timeout_minutes); "
        "fix the cause and start again: prepared data stays in the cache"
    )


@pytest.mark.slow
def test_where_rank_0_is_killed_the_others_do_not_wait(tmp_path: Path) -> None:
    with launched(tmp_path, "slow", timeout=2.0) as processes:
        while not (tmp_path / "began-1").exists():
            assert processes[1].poll() is None
            time.sleep(0.02)
        processes[0].send_signal(signal.SIGKILL)
        assert processes[1].wait(timeout=60) == 1
    assert "error: preparing the data: rank 0 at 127.0.0.1:" in log_path(tmp_path, 1).read_text().splitlines()[-1]


@pytest.mark.slow
def test_all_leave_alike_where_one_was_stopped(tmp_path: Path) -> None:
    with launched(tmp_path, "early", timeout=60.0) as processes:
        for process in processes:
            process.wait(timeout=60)
    assert {rank: record.exit for rank, record in read_rank_records(tmp_path).items()} == {0: 1, 1: 1}, (
        "no checkpoint is there"
    )
    for rank in (0, 1):
        line = log_path(tmp_path, rank).read_text().splitlines()[-1]
        assert line.startswith("error: stopped by SIGTERM before the first step; rerun the same command")


def test_a_fork_while_the_heartbeat_beats_is_harmless(tmp_path: Path) -> None:
    assert ended(tmp_path, "fork") == [(0, ""), (0, "")]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    with launched(tmp_path, "none", timeout=3.0) as processes:
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=60) == 1
    assert "meeting the other processes: not all came within 3 s" in log_path(tmp_path, 0).read_text()
