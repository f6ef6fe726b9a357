"""A world of one: without a process group, and with one that needs no port."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dstrain.distributed import store, world
from dstrain.distributed.store import rendezvous_errors, rendezvous_over_store
from dstrain.distributed.world import SingleProcessWorld, joined_world
from dstrain.errors import PeerFailureError, RunError

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    yield
    assert not dist.is_initialized()


def test_a_process_without_a_group_has_its_own_values() -> None:
    single = SingleProcessWorld()
    assert single.sum([1, 2.5]) == [1.0, 2.5]
    assert (single.any(True), single.any(False)) == (True, False)
    assert single.gather("a") == ["a"]
    assert single.broadcast("b") == "b"
    assert single.barrier() is None
    assert single.new_group() is single
    assert single.device.type == "cpu"


def test_a_process_with_a_group_answers_alike() -> None:
    with joined_world(torch.device("cpu"), TIMEOUT) as joined:
        assert joined.sum([1, 2.5]) == [1.0, 2.5]
        assert joined.any(True)
        assert not joined.any(False)
        assert joined.gather({"a": 1}) == [{"a": 1}]
        assert joined.broadcast(("b",)) == ("b",)
        joined.barrier()
        other = joined.new_group()
        assert (other.rank, other.size, other.sum([3.0])) == (0, 1, [3.0])


def test_a_group_that_is_there_is_joined_as_it_is() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    try:
        world._init_process_group(torch.device("cpu"), TIMEOUT, None)
        assert dist.group.WORLD is group
    finally:
        world.destroy_process_groups()


def test_rank_0_writes_its_port_and_removes_it_when_all_have_read_it(tmp_path: Path) -> None:
    found, messages = rendezvous_over_store(TIMEOUT, "hello", tmp_path / "ports" / "port")
    assert messages == ["hello"]
    assert found.port > 1
    assert [*(tmp_path / "ports").iterdir()] == []


def test_another_rank_reads_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    (tmp_path / "port").write_text(str(server.port))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, rank, size = store._open_local_store(tmp_path / "port", TIMEOUT)
    assert (rank, size) == (1, 2)
    assert store.os.environ["MASTER_PORT"] == str(server.port)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("[/x/gloo/transport.cc:1] Unable to find interface for: [lo]", RunError, "bring its network interface up"),
        (
            "[enforce fail at /x/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nope0",
            RunError,
            "set GLOO_SOCKET_IFNAME to one with an address",
        ),
        ("[/x/gloo/pair.cc:1] Connection refused", PeerFailureError, r"it failed \(Connection refused\)"),
        ("something else", RuntimeError, "something else"),
    ],
)
def test_an_error_at_the_meeting_is_explained(text: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught, rendezvous_errors(TIMEOUT):
        raise RuntimeError(text)
    assert type(caught.value) is kind


def test_a_rank_that_does_not_come_is_said_with_the_time() -> None:
    with (
        pytest.raises(PeerFailureError, match=r"not all came within 0 s \(gone\)"),
        rendezvous_errors(timedelta(seconds=0)),
    ):
        raise RuntimeError("[/x/gloo/pair.cc:1] gone")
