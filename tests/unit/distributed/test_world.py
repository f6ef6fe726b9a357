"""Where the ranks of a launch meet: a port that is taken, a port of rank 0's own choice, and no port for one alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from dstrain.distributed.store import rendezvous_over_store
from dstrain.errors import PeerFailureError
from dstrain.launch.command import PORT_FILE_ENV
from dstrain.launch.topology import Worker
from dstrain.train.rendezvous import Rendezvous
from tests.workers import ROOT

MEET = """
import os, sys
from datetime import timedelta
from dstrain.launch.topology import Worker
from dstrain.train.rendezvous import Rendezvous
with Rendezvous(Worker(int(sys.argv[1]), 0, 2, "tests", 2), timedelta(seconds=20)) as together:
    pass
print(together.store.port, flush=True)
sys.stdin.read()  # rank 0 serves the store until all have left
os._exit(0)
"""


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


@pytest.fixture
def taken():
    with socket.create_server(("", 0)) as thief:
        yield thief.getsockname()[1]


def test_a_taken_port_is_named_with_who_holds_it(taken, monkeypatch):
    monkeypatch.delenv(PORT_FILE_ENV, raising=False)
    for name, value in environment(0, 2, taken).items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(PeerFailureError) as caught,
        Rendezvous(Worker(0, 0, 2, "tests", 2), timedelta(minutes=10)),
    ):
        pass
    assert str(caught.value).startswith(f"meeting the other processes: the rendezvous port {taken} of ")
    assert re.search(rf"is already in use by \S+ \(pid {os.getpid()}\); rerun the command", str(caught.value))


def test_ranks_of_one_host_meet_although_the_port_was_taken(taken, tmp_path):
    place = tmp_path / ".workers/port-1"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEET, f"{rank}"],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment(rank, 2, taken), PORT_FILE_ENV: str(place)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.stdout.readline().strip() for process in started]
    for process in started:
        process.communicate(timeout=60)
    assert [process.returncode for process in started] == [0, 0]
    assert len(set(said)) == 1
    assert said[0] != str(taken)
    assert list(place.parent.iterdir()) == []


def test_rank_0_that_never_listens_is_not_waited_for(tmp_path, monkeypatch):
    for name, value in environment(1, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PeerFailureError, match=r"not all came within 0\.3 s \(rank 0 did not listen\)"):
        rendezvous_over_store(timedelta(seconds=0.3), "word", Path(tmp_path / "port-1"))


def test_one_process_alone_needs_no_port(taken):
    code = (
        "import torch; from datetime import timedelta; from dstrain.distributed.world import TorchWorld\n"
        "world = TorchWorld.join(torch.device('cpu'), timedelta(seconds=20)); other = world.new_group()\n"
        "print(other.sum([2.0]), other.gather('a')); world.close()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment(0, 1, taken)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[2.0] ['a']\n", done.stderr
