"""A rank that dies, stops or hangs: the others end with its name, a table of all ranks, and what to do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dstrain.launch.probe import free_port
from dstrain.launch.worker import log_path, read_rank_records
from tests.forked import Forked, fork, start_origins
from tests.vocabulary import read_jsonl

RANK = "tests.faults.rank_with_fault"
HOST = socket.gethostname()
MEND = "fix the cause and start again: the run resumes from its latest complete checkpoint"


@contextlib.contextmanager
def start_ranks(
    function: str, folder: Path, fault: str, ranks: int = 2, timeout: float = 4.0, caches: Sequence[str] = ()
) -> Iterator[list[Forked]]:
    """Ranks of a launch, which call the function; none is left behind. `caches`: DSTRAIN_CACHE of each."""
    start_origins()
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    env |= {"OMP_NUM_THREADS": "1", "RANK_FAULT_TIMEOUT": str(timeout)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({"DSTRAIN_CACHE": caches[rank]} if caches else {})
        processes.append(fork(rank, function, folder, fault, env=env | own, quiet=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def launched(folder: Path, fault: str, ranks: int = 2, timeout: float = 4.0) -> AbstractContextManager[list[Forked]]:
    return start_ranks(f"{RANK}:main", folder, fault, ranks, timeout)


def last_line(folder: Path, rank: int = 0) -> str:
    return log_path(folder, rank).read_text().splitlines()[-1]


def ended(folder: Path, fault: str, ranks: int = 2, timeout: float = 4.0) -> tuple[int, str]:
    """Rank 0's exit code and last line."""
    with launched(folder, fault, ranks, timeout) as processes:
        code = processes[0].wait(timeout=60)
    assert "Traceback" not in log_path(folder, 0).read_text()
    return code, last_line(folder)


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, "SIGKILL", timeout=60.0) as processes:
        start = time.monotonic()
        code, line = processes[0].wait(timeout=60), last_line(tmp_path)
    assert code == 1
    assert time.monotonic() - start < 30
    assert "Traceback" not in log_path(tmp_path, 0).read_text()
    assert line.startswith(f"error: step 3: rank 1 on {HOST} has ended, or lost the network while 1 of 2 ranks waited ")
    assert "in all_reduce no. " in line
    assert line.endswith(MEND)
    table = log_path(tmp_path, 0).read_text().splitlines()[-4:-1]
    assert table[0].split() == ["rank", "host", "state", "doing", "last", "collective", "idle", "seconds"]
    assert table[1].split()[:3] == ["1", HOST, "silent"]
    assert re.search(r"step 3 +all_reduce no\. \d+", table[2])


@pytest.mark.slow
def test_a_stopped_rank_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    code, line = ended(tmp_path, "SIGSTOP")
    assert code == 1
    assert line.startswith(f"error: step 3: rank 1 on {HOST} went silent: 1 of 2 ranks waited 4 s")
    assert line.endswith(MEND)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_collective_and_shows_where(tmp_path: Path) -> None:
    code, line = ended(tmp_path, "hang")
    assert code == 1
    assert line.startswith(
        f"error: step 3: rank 1 on {HOST} did not enter all_reduce no. 4 that 1 of 2 ranks waited in for 4 s"
    )
    assert "see logs/stacks/rank-00001.txt" in line
    stacks = (tmp_path / "logs/stacks/rank-00001.txt").read_text()
    assert "hang_here" in stacks
    assert "step 3: nothing moved for 3 s" in stacks
    assert "last collectives: all_reduce no. 3 of group 0, all_reduce no. " in stacks
    events = read_jsonl(tmp_path / "events.jsonl")
    assert [(event["event"], event["step"], event["ranks"]) for event in events] == [("stalled", 3, [1])]
    assert f"stalled: step 3: rank 1 on {HOST} did not enter all_reduce" in log_path(tmp_path, 0).read_text()


def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path) -> None:
    code, line = ended(tmp_path, "skip", ranks=3)
    assert code == 1
    assert f"rank 1 on {HOST} did not enter all_reduce no. 4 that 2 of 3 ranks waited in" in line


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreter_still_shows_its_stack(tmp_path: Path) -> None:
    with launched(tmp_path, "lock") as processes:
        assert processes[0].wait(timeout=60) == 1
        time.sleep(2.0)
    assert f"rank 1 on {HOST} went silent: 1 of 2 ranks waited" in last_line(tmp_path)
    assert "hold_the_lock" in (tmp_path / "logs/stacks/rank-00001.txt").read_text()


def test_the_error_of_a_rank_is_told_by_the_others(tmp_path: Path) -> None:
    code, line = ended(tmp_path, "raise", timeout=60.0)
    assert code == 1
    assert f"rank 1 on {HOST} failed: ValueError: of its own; see logs/rank-00001.log" in line


def test_all_ranks_leave_alike_where_one_was_stopped_before_the_first_step(tmp_path: Path) -> None:
    with launched(tmp_path, "early", timeout=60.0) as processes:
        for process in processes:
            process.wait(timeout=60)
    assert {rank: record.exit for rank, record in read_rank_records(tmp_path).items()} == {0: 1, 1: 1}, (
        "no checkpoint is there"
    )
    for rank in (0, 1):
        assert last_line(tmp_path, rank).startswith(
            "error: stopped by SIGTERM before the first step; rerun the same command"
        )
        assert "Traceback" not in log_path(tmp_path, rank).read_text()


@pytest.mark.slow
def test_words_of_an_earlier_launch_are_not_read(tmp_path: Path) -> None:
    code, line = ended(tmp_path, "raise", timeout=60.0)
    assert "of its own" in line
    code, line = ended(tmp_path, "SIGKILL", timeout=60.0)
    assert f"rank 1 on {HOST} has ended, or lost the network" in line
    assert code == 1


def test_a_run_in_which_all_goes_well_says_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, "none") as processes:
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert log_path(tmp_path, 0).read_text() == ""
    assert not (tmp_path / "events.jsonl").exists()


@pytest.mark.slow
def test_no_one_waits_for_a_rank_that_never_came(tmp_path: Path) -> None:
    with launched(tmp_path, "none") as processes:
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=60) == 1
    assert "meeting the other processes" in last_line(tmp_path)
