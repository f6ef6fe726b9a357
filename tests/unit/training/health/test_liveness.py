"""Ranks that lose one another; here each is a thread (tests/faults/test_silence.py has processes)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dstrain.distributed.store import sign
from dstrain.errors import EXIT_FAILED
from dstrain.training.health import liveness
from dstrain.training.health.diagnosis import Failure
from dstrain.training.health.liveness import (
    Liveness,
    call_with_timeout,
    parse_failure,
)

MakeRanks = Callable[..., list[Liveness]]


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    """Make a Liveness for each rank, each on a host of its own, over one store; those in `absent` never start."""
    started: list[Liveness] = []

    def make(size: int, absent: tuple[int, ...] = ()) -> list[Liveness]:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=10))
        hosts = [f"h{rank}" for rank in range(size)]
        ranks = [Liveness(store, rank, hosts, timedelta(seconds=2)) for rank in range(size)]
        for one in ranks:
            one._write_status() if one.rank in absent else one.start()
        started.extend(ranks)
        return ranks

    yield make
    for one in started:
        one.close()


def ask_all(ranks: list[Liveness], reason: str = "Timed out") -> list[Failure]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda one: one.diagnose_failure(reason), ranks))


def test_all_ranks_report_the_same_lost_rank(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "STATUS_TIMEOUT_SECONDS", 1.0)
    ranks = make_ranks(4, absent=(2,))
    found = ask_all([one for one in ranks if one.rank != 2])
    assert len(set(found)) == 1
    assert found[0].is_peer_lost
    assert found[0].error.startswith("rank 2 on h2 went silent")
    assert len(found[0].table.splitlines()) == 5


def test_one_rank_reads_the_status_of_all(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, asked = make_ranks(4), []
    collect = Liveness._collect_statuses
    monkeypatch.setattr(Liveness, "_collect_statuses", lambda own, *args: asked.append(own.rank) or collect(own, *args))
    ask_all(ranks)
    assert len(asked) == 1


def test_a_rank_that_is_done_is_not_waited_for(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3)
    ranks[2].finish()
    start = time.monotonic()
    failures = ask_all(ranks[:2], "Connection closed by peer")
    assert time.monotonic() - start < 3
    assert failures[0].error.startswith("all ranks answer, but cannot reach each other")


def test_the_error_of_a_rank_is_known_to_the_others_before_the_store_ends(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3)
    ranks[0].report_failure(Failure(rank=0, error="ValueError: no"))
    for one in ranks:
        one._store = None  # rank 0 has ended, and the store with it
    assert {one.diagnose_failure("Connection reset").error for one in ranks[1:]} == {"ValueError: no"}


def test_the_first_failure_counts(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: one.report_failure(Failure(rank=one.rank, error=f"of {one.rank}")), ranks))
    assert len({one.failure for one in ranks}) == 1


def test_without_a_store_rank_0_is_lost(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "STATUS_TIMEOUT_SECONDS", 0.2)
    ranks = make_ranks(2)
    ranks[1].close()
    ranks[1]._store = None
    found = ranks[1].diagnose_failure("Connection closed by peer")
    assert found.error.startswith("rank 0 on h0 has ended, or lost the network")


def test_a_store_that_hangs_is_not_waited_for(make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "STATUS_TIMEOUT_SECONDS", 0.2)

    class Hanging:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: threading.Event().wait()

    ranks = make_ranks(2)
    ranks[1].close()
    ranks[1]._store = Hanging()
    start = time.monotonic()
    assert ranks[1].diagnose_failure("Timed out").error.startswith("rank 0 on h0 went silent")
    ranks[1].finish()
    assert time.monotonic() - start < 5


def test_rank_0_reports_a_stall(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3)
    found = [one.diagnose_stall(1.0) for one in ranks]
    assert found[0] is not None
    assert found[1:] == [None, None]


def test_another_rank_reports_a_stall_where_rank_0_is_silent(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(3, absent=(0,))
    ranks[0]._store.set("heartbeat/0", "1")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: one.diagnose_stall(0.5), ranks[1:]))
    assert [diagnosis.ranks for diagnosis in found if diagnosis] == [(0,)]


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"[]", b'{"rank": "x"}', b'{"rank": 0, "exit_code": 1, "error": 5}', b"7", b'{"rank": 1e999}'],
)
def test_a_failure_that_no_rank_wrote_is_named(content: bytes) -> None:
    found = parse_failure(sign(content))
    assert found.exit_code == EXIT_FAILED
    assert "the rendezvous store holds a value that no rank wrote" in found.error
    assert "is not signed with this run's DSTRAIN_RANK_KEY" in parse_failure(content).error


@pytest.mark.parametrize("rank", [-999, 2])
def test_a_rank_that_does_not_exist_has_no_host(rank: int, make_ranks: MakeRanks) -> None:
    assert make_ranks(2)[0].describe_rank(rank) == f"rank {rank}"


def test_control_characters_of_a_failure_are_escaped(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2)
    ranks[1].report_failure(Failure(rank=1, exit_code=2, error="\x1b]0;pwned\x07 disk full"))
    assert ranks[0].failure is not None
    assert ranks[0].failure.error == "\\x1b]0;pwned\\x07 disk full"


def test_what_takes_too_long_or_fails_gives_the_other_value() -> None:
    assert call_with_timeout(lambda: 1 // 0, 7, 60.0) == 7
    assert call_with_timeout(lambda: threading.Event().wait() and 1, 7, 0.1) == 7
    assert call_with_timeout(lambda: 3, 7, 60.0) == 3


@pytest.mark.parametrize("size", [64, 512, 4096])
def test_all_ranks_together_send_at_most_a_thousand_heartbeats_a_second(size: int) -> None:
    assert size / Liveness(dist.HashStore(), 0, ["h"] * size, timedelta(minutes=10)).interval <= 1024


def test_a_rank_ends_when_the_store_of_rank_0_stops_answering(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 is stopped (SIGSTOP): a request waits in C code without a limit."""
    for name in ("STATUS_TIMEOUT_SECONDS", "FAILURE_WAIT_SECONDS"):
        monkeypatch.setattr(liveness, name, 0.0)
    monkeypatch.setattr(liveness, "_GUARD_POLL_SECONDS", 0.02)
    ended, answers = threading.Event(), threading.Event()

    class StoppedStore(dist.HashStore):
        def clone(self) -> StoppedStore:
            return self

        def add(self, key: str, amount: int) -> int:
            answers.wait(30)
            return 0

    def exit_process(code: int) -> None:
        assert code == 1
        ended.set()
        rank_1.close()

    monkeypatch.setattr(liveness.os, "_exit", exit_process)
    rank_1 = Liveness(StoppedStore(), 1, ["host1", "host2"], timedelta(seconds=0.2))
    rank_1.start()
    assert ended.wait(20)
    answers.set()
    assert "error: rank 0 on host1 has not answered for " in capfd.readouterr().err
