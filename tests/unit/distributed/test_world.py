"""A world of one: without a process group, and with one that needs no port."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dstrain.distributed import world
from dstrain.distributed.store import connect_store, rendezvous_errors
from dstrain.distributed.world import SingleProcessWorld, joined_world
from dstrain.errors import PeerFailureError, RunError, UsageError
from dstrain.launch.plan import Launch
from dstrain.launch.spawn import LocalWorkerGroup
from dstrain.launch.topology import Worker
from dstrain.training.rendezvous import Rendezvous
from tests.workers import ROOT

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


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a torchrun agent that has started ranks before."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store.set("dstrain/rank-0", f"127.0.0.1 {free.getsockname()[1]}")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return store


def test_ranks_that_torchrun_starts_again_meet_at_a_new_store(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.set("dstrain/failure", "of the ranks before")
    first = connect_store(TIMEOUT)
    assert os.environ["MASTER_PORT"] == str(first.port) != str(agent.port)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    second = connect_store(TIMEOUT)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert not second.check(["dstrain/failure"])


def test_the_address_of_an_earlier_rank_0_is_not_used(agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(PeerFailureError, match=r"not all came within 0\.5 s \(rank 0 did not listen\)"):
        connect_store(timedelta(seconds=0.5))


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


# Where the ranks of a launch meet: a port that is taken, a port of rank 0's own choice, and no port for one alone.


MEET = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from dstrain.launch.topology import Worker
from dstrain.training.rendezvous import Rendezvous
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
with Rendezvous(Worker(rank, rank, 2, "tests", 2), timedelta(seconds=20)) as together:
    pass
(folder / f"port-{rank}").write_text(str(together.store.port))
while len(list(folder.glob("port-*"))) < 2:  # rank 0 serves the store until all have left
    time.sleep(0.02)
os._exit(0)
"""


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


@pytest.fixture
def taken():
    with socket.create_server(("", 0)) as thief:
        yield thief.getsockname()[1]


def test_a_taken_port_is_named_with_who_holds_it(taken, monkeypatch):
    for name, value in environment(0, 2, taken).items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(PeerFailureError) as caught,
        Rendezvous(Worker(0, 0, 2, "tests", 2), timedelta(minutes=10)),
    ):
        pass
    assert str(caught.value).startswith(f"meeting the other processes: the rendezvous port {taken} of ")
    assert re.search(rf"is already in use by \S+ \(pid {os.getpid()}\); rerun the command", str(caught.value))


@pytest.mark.slow
def test_ranks_of_one_host_meet_at_a_port_that_nobody_else_can_take(tmp_path, monkeypatch):
    """It listens before a rank exists, and rank 0 inherits it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    argv = [sys.executable, "-c", MEET, str(tmp_path)]
    group = LocalWorkerGroup(Launch(argv=argv, environment=os.environ, world_size=2, ranks=range(2)), tmp_path)
    group.start()
    until = time.monotonic() + 60
    while group.alive_ranks:
        group.poll()
        assert time.monotonic() < until
        time.sleep(0.05)
    assert {rank: end.status for rank, end in group.ends.items()} == {0: 0, 1: 0}
    first, second = ((tmp_path / f"port-{rank}").read_text() for rank in range(2))
    assert first == second
    assert not (tmp_path / ".workers").exists()


def test_a_rank_without_an_address_of_rank_0_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR of rank 0 must be in the environment"):
        connect_store(TIMEOUT)


@pytest.mark.slow
def test_one_process_alone_needs_no_port(taken):
    code = (
        "import torch; from datetime import timedelta; from dstrain.distributed.world import TorchWorld\n"
        "world = TorchWorld.join(torch.device('cpu'), timedelta(seconds=20)); other = world.new_group()\n"
        "print(other.sum([2.0]), other.gather('a')); world.close()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment(0, 1, taken)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[2.0] ['a']\n", done.stderr
