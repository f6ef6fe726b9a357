"""Ranks that prepare at their own pace over one store; here each is a thread (tests/faults/test_preparing.py has processes)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dstrain import cache
from dstrain.distributed.store import sign
from dstrain.errors import DataError, PeerFailureError, RunError, UsageError
from dstrain.launch.topology import Worker
from dstrain.training import rendezvous
from dstrain.training.health import liveness
from dstrain.training.health.liveness import Failure, Liveness, set_value
from dstrain.training.health.signals import StoppedBySignal
from dstrain.training.rendezvous import Rendezvous

MEND = "fix the cause and start again: prepared data stays in the cache"


def make_liveness(size: int = 2) -> Liveness:
    return Liveness(dist.HashStore(), 0, [f"h{rank}" for rank in range(size)], timedelta(seconds=10))


class CountingStore:
    """A store that counts requests, and the keys in them."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_requests, self.num_keys = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        def request(keys: Any = (), *values: Any) -> Any:
            self.num_requests += name != "clone"
            self.num_keys += len(keys) if isinstance(keys, list) else 1
            return self if name == "clone" else getattr(self.inner, name)(keys, *values)

        return request


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs `act(rank, rendezvous)` within each rank's rendezvous; what each raised, or None."""

    def run(size: int, act: Callable[[int, Rendezvous], None], timeout: float = 30.0) -> list[Any]:
        store, own = dist.HashStore(), threading.local()
        store.set_timeout(timedelta(seconds=10))

        def live(rank: int) -> BaseException | None:
            own.rank = rank
            together = Rendezvous(Worker(rank, rank, size, "tests", size), timedelta(seconds=timeout))
            try:
                with together:
                    act(rank, together)
                assert together.store is store
            except BaseException as error:
                return error
            finally:
                together.liveness.close()
            return None

        monkeypatch.setattr(rendezvous, "connect_store", lambda *_: store)
        monkeypatch.setattr(rendezvous, "socket", SimpleNamespace(gethostname=lambda: f"h{own.rank}"))
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(live, range(size)))

    return run


@pytest.mark.parametrize("name", ["torch", rendezvous.CODE_DIGEST_KEY])
def test_a_host_with_other_software_is_refused_on_every_rank(
    name: str, prepared: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is prepared, and before any process group; the same words and code 2 from each."""
    own, own_code, asked = rendezvous.read_package_versions(), rendezvous.hash_source_tree(), threading.Lock()

    def first() -> bool:  # of the ranks that ask; the others have the same
        return asked.acquire(blocking=False)

    def other(value: Any) -> Callable[[], Any]:
        return lambda: (own | {"torch": "1.13.1"} if name == "torch" else "0" * 12) if first() else value

    monkeypatch.setattr(
        rendezvous,
        *(("read_package_versions", other(own)) if name == "torch" else ("hash_source_tree", other(own_code))),
    )
    errors = prepared(3, lambda rank, together: pytest.fail("it prepares"))
    assert {type(error) for error in errors} == {UsageError}
    (said,) = {str(error) for error in errors}
    assert f" has {name} " in said
    assert said.endswith("; install the same versions on every host")


def test_a_rank_that_takes_longer_than_the_timeout_is_waited_for(prepared: Callable[..., list[Any]]) -> None:
    assert prepared(3, lambda rank, together: time.sleep(2.0 if rank == 1 else 0), timeout=0.8) == [None] * 3


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_file_on_one_rank_is_told_with_its_code(bad: int, prepared: Callable[..., list[Any]]) -> None:
    def act(rank: int, together: Rendezvous) -> None:
        if rank == bad:
            raise DataError("train.jsonl:7: is bad; mend it")

    errors = prepared(3, act)
    assert isinstance(errors.pop(bad), DataError)
    assert {type(error) for error in errors} == {UsageError}
    assert {error.exit_code for error in errors} == {2}
    assert all(str(error).endswith("failed: train.jsonl:7: is bad; mend it") for error in errors)
    assert all(f"rank {bad} on h{bad} failed" in str(error) for error in errors)


def test_the_same_fault_on_all_is_each_ones_own_and_nobody_waits(prepared: Callable[..., list[Any]]) -> None:
    def act(rank: int, together: Rendezvous) -> None:
        raise DataError("train.jsonl:7: is bad; mend it")

    began = time.monotonic()
    assert [str(error) for error in prepared(3, act)] == ["train.jsonl:7: is bad; mend it"] * 3
    assert time.monotonic() - began < liveness.FAILURE_WAIT_SECONDS


def test_an_error_of_its_own_is_told_in_one_line(prepared: Callable[..., list[Any]]) -> None:
    def act(rank: int, together: Rendezvous) -> None:
        if rank:
            raise ValueError("of\nits own")

    error, own = prepared(2, act)
    assert isinstance(own, ValueError)
    assert isinstance(error, PeerFailureError)
    assert str(error).startswith("preparing the data: rank 1 on h1")
    assert str(error).endswith(f" failed: ValueError: of\\nits own; {MEND}")


def test_all_are_interrupted_where_one_is(prepared: Callable[..., list[Any]]) -> None:
    def act(rank: int, together: Rendezvous) -> None:
        if rank == 1:
            raise StoppedBySignal("SIGTERM")

    assert [(type(error), error.signal_name) for error in prepared(3, act)] == [(StoppedBySignal, "SIGTERM")] * 3


@pytest.mark.slow
def test_a_rank_whose_heartbeat_stands_still_is_named(prepared: Callable[..., list[Any]]) -> None:
    def act(rank: int, together: Rendezvous) -> None:
        if rank == 2:
            together.liveness.close()  # as if it were stopped
            time.sleep(1.5)

    errors = prepared(3, act, timeout=0.5)
    for error in errors[:2]:
        assert isinstance(error, PeerFailureError)
        assert "preparing the data: rank 2 on h2" in str(error)
        assert str(error).endswith(f" sent no heartbeat for 0.5 s (timeout_minutes); {MEND}")


def test_a_rank_that_stood_still_itself_gives_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a host that was suspended wake at once: the others' heartbeats come a moment after the look at them."""
    together = Rendezvous(Worker(0, 0, 2, "tests", 2), timedelta(seconds=10))
    together.liveness = make_liveness()
    now, looks = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += 100.0 if len(looks) == 3 else seconds

    def read_heartbeats(ranks: Sequence[int]) -> list[str]:
        looks.append(now[0])
        is_asleep = 100 <= now[0] < 106  # it wakes some seconds after this rank
        return [str(now[0]), str(looks[2] if is_asleep else now[0])]

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(together.liveness, "read_heartbeats", read_heartbeats)
    together._wait_until(lambda: now[0] > 130)
    assert len(looks) > 20


def test_of_ranks_that_share_a_cache_one_goes_first_and_is_taken_at_its_word(
    prepared: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path))
    order: list[Any] = []

    def act(rank: int, together: Rendezvous) -> None:
        with together.local_main_process_first():
            checked = cache._checked_folders.get()
            assert checked is not None
            order.append((rank, sorted(checked)))
            if rank == 0:
                time.sleep(0.3)
                order.append("done")
                checked.add("a store")

    assert prepared(3, act) == [None] * 3
    assert order[:2] == [(0, []), "done"]
    assert sorted(order[2:]) == [(1, ["a store"]), (2, ["a store"])]


def test_a_failure_that_was_heard_of_counts_more_than_the_store_that_went_with_it() -> None:
    together = Rendezvous(Worker(1, 1, 2, "tests", 2), timedelta(seconds=1))
    together.liveness = make_liveness()
    together.liveness.failure = Failure(rank=0, exit_code=2, error="train.jsonl:7: is bad")
    with (
        pytest.raises(UsageError, match=r"rank 0 on h0 failed: train\.jsonl:7: is bad"),
        together._translate_store_errors(),
    ):
        raise RuntimeError("Connection reset by peer")


def test_a_process_alone_meets_nobody() -> None:
    together = Rendezvous(Worker(0, 0, 1, "tests", 1), timedelta(seconds=1))
    with together, together.local_main_process_first():
        assert cache._checked_folders.get() == set()
    assert together.store is None
    with pytest.raises(DataError), together:
        raise DataError("bad; mend")


def test_values_are_gathered_by_rank_and_a_slow_rank_is_waited_for(prepared: Callable[..., list[Any]]) -> None:
    gathered: list[list[Any]] = []

    def act(rank: int, together: Rendezvous) -> None:
        time.sleep(2.0 if rank == 1 else 0)  # longer than the timeout: its heartbeat counts
        gathered.append(together.gather(rank))
        gathered.append(together.gather([f"second {rank}", None]))

    assert prepared(3, act, timeout=0.8) == [None] * 3
    assert gathered.count([0, 1, 2]) == 3
    assert gathered.count([[f"second {rank}", None] for rank in range(3)]) == 3


def test_a_rank_that_fails_ends_the_others_in_a_gather(prepared: Callable[..., list[Any]]) -> None:
    def act(rank: int, together: Rendezvous) -> None:
        if rank == 1:
            raise DataError("x.jsonl is empty")
        together.gather(rank)

    errors = prepared(3, act)
    assert all(isinstance(error, UsageError) for error in errors)
    assert "rank 1 on h1" in str(errors[0])


UNSIGNED = "is not signed with this run's DSTRAIN_RANK_KEY"
NOT_WRITTEN = "that no rank wrote"


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("gather/0/1", (b"\xff\xfe", UNSIGNED)),
        ("gather/0/1", (sign(b"["), NOT_WRITTEN)),
        ("data/1", (b"7", UNSIGNED)),
        ("data/1", (sign(b'[["a"]]'), NOT_WRITTEN)),
    ],
)
def test_a_value_in_the_store_that_no_rank_wrote_ends_in_a_clear_error(
    key: str, content: tuple[bytes, str], prepared: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "FAILURE_WAIT_SECONDS", 0.2)

    def act(rank: int, together: Rendezvous) -> None:
        if rank == 1:
            together._store.set(key, content[0])
            if key.startswith("gather"):
                together._store.add("gather/0/count", 1)
            together._wait_until(lambda: False)
        if key.startswith("gather"):
            together.gather(0)
        together._first_with_cache = [1, 1]
        with together.local_main_process_first():
            pytest.fail("it prepares")

    error, _ = prepared(2, act)
    assert isinstance(error, RunError)
    assert content[1] in str(error)


@pytest.mark.parametrize("hello", [7, {"host": 7}, {"host": "h", "place": "p", "software": 7}, {"host": "h"}])
def test_a_first_message_that_no_rank_wrote_ends_in_a_clear_error(hello: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    set_value(dist.PrefixStore("dstrain", store), "hello/1", hello)
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: store)
    together = Rendezvous(Worker(0, 0, 2, "tests", 2), timedelta(seconds=1))
    with pytest.raises(PeerFailureError, match="the rendezvous store holds a value that no rank wrote"), together:
        pytest.fail("it prepares")


def test_a_first_message_without_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("dstrain/hello/1", b"{}")
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: store)
    with (
        pytest.raises(RunError, match="is not signed with this run's DSTRAIN_RANK_KEY"),
        Rendezvous(Worker(0, 0, 2, "tests", 2), timedelta(seconds=1)),
    ):
        pytest.fail("it prepares")


def test_a_rank_that_ends_before_its_first_heartbeat_keeps_nobody_from_a_failure(
    prepared: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a key that is missing blocks, and with it what listens for failures."""
    start = Liveness.start
    monkeypatch.setattr(Liveness, "start", lambda own: None if own.rank == 1 else start(own))
    monkeypatch.setattr(liveness, "FAILURE_WAIT_SECONDS", 0.5)

    def act(rank: int, together: Rendezvous) -> None:
        if rank == 2:
            time.sleep(0.5)
            raise DataError("train.jsonl:7: is bad; mend it")
        if rank == 1:
            raise SystemExit

    began = time.monotonic()
    errors = prepared(3, act, timeout=8.0)
    assert str(errors[0]).startswith("preparing the data: rank 1 on h1 failed")
    assert time.monotonic() - began < 7


def test_host_names_and_versions_of_other_ranks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    other = {"host": "h1\x1b]0;x\x07", "machine": "m", "cache": "c", "software": {"torch": "1\x1b"}, "pid": 1}
    set_value(dist.PrefixStore("dstrain", store), "hello/1", other)
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: store)
    monkeypatch.setattr(rendezvous, "read_package_versions", lambda: {"torch": "2"})
    with pytest.raises(UsageError) as caught, Rendezvous(Worker(0, 0, 2, "tests", 2), timedelta(seconds=1)):
        pytest.fail("it prepares")
    assert str(caught.value).startswith("rank 1 on h1\\x1b]0;x\\x07 has torch 1\\x1b, and rank 0 on ")


@pytest.mark.parametrize("size", [64, 512, 4096])
def test_messages_of_a_rank_do_not_grow_with_the_number_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank but 0 sends and reads the same number of messages, at the start, in a gather and at the end."""
    store = CountingStore(dist.HashStore())
    monkeypatch.setattr(rendezvous, "connect_store", lambda *_: store)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(liveness.Liveness, "start", lambda own: None)
    hosts = {"hosts": ["other", "here"], "host": [0] * (size - 2) + [1, 1]}
    set_value(store.inner, "members", hosts | {"first": [0] * size, "fault": ""})
    for number in range(2):
        set_value(store.inner, f"gather/{number}", [0] * size)
    together = Rendezvous(Worker(size - 1, 1, size, "tests", 2), timedelta(seconds=10))
    with together:
        together.gather(1)
    assert (store.num_requests, store.num_keys) == (11, 12)


def test_rank_0_reads_each_key_of_a_gather_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for size in (64, 512, 4096):
        store = CountingStore(dist.HashStore())
        together = Rendezvous(Worker(0, 0, size, "tests", 2), timedelta(seconds=10))
        together._store, together.liveness = store, make_liveness(size)
        for rank in range(1, size):
            set_value(store.inner, f"gather/0/{rank}", rank)
        store.inner.add("gather/0/count", size - 1)
        assert together.gather(0) == list(range(size))
        counts[size] = store.num_keys - size
    assert len(set(counts.values())) == 1
