"""Rank and agent of a host: the environment, which is on no disk, and a rank's end without heartbeats."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrain.launch import heartbeat
from dstrain.launch.heartbeat import HEARTBEAT_ENV, HeartbeatServer, fetch_environment
from tests.workers import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract socket names are Linux's")
SILENCE = 0.6
RANK = "import time\nfrom dstrain.launch.heartbeat import watch_heartbeat\nwatch_heartbeat()\nprint('on', flush=True)\ntime.sleep(60)"
AGENT = """
import sys, time
from dstrain.launch.heartbeat import HeartbeatServer
beats = HeartbeatServer(float(sys.argv[1]))
beats.set_environment({"HF_TOKEN": "secret"})
print(beats.socket_name, flush=True)
while True:
    beats.send_heartbeats()
    time.sleep(0.02)
"""


@contextlib.contextmanager
def beating(beats: HeartbeatServer) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            beats.send_heartbeats()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def start(code: str, *words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def pair() -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """An agent, and a rank that follows it."""
    with start(AGENT, f"{SILENCE}") as agent:
        assert agent.stdout is not None
        with start(RANK, **{HEARTBEAT_ENV: f"{agent.stdout.readline().strip()} {SILENCE}"}) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "on\n"
            yield agent, rank
            rank.kill()
        agent.kill()


def test_the_environment_comes_whole_and_from_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {"HF_TOKEN": "a 'secret'\n$HOME %h", "MINE": json.dumps({"k": "ü" * 400_000})}
    beats = HeartbeatServer(1.0)
    beats.set_environment(environment)
    with beating(beats):
        assert fetch_environment(beats.socket_name, beats.token) == environment
        assert fetch_environment(beats.socket_name, beats.token) == environment, "the next rank"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_asks_too_early_is_answered_later():
    beats = HeartbeatServer(1.0)
    threading.Timer(0.3, beats.set_environment, [{"A": "1"}]).start()
    with beating(beats):
        assert fetch_environment(beats.socket_name, beats.token) == {"A": "1"}


def test_an_agent_that_hangs_is_not_waited_for_without_end():
    beats = HeartbeatServer(1.0)
    with pytest.raises(TimeoutError):
        fetch_environment(beats.socket_name, beats.token, 0.2)
    with pytest.raises(ConnectionRefusedError):
        fetch_environment("dstrain-nobody", "", 0.2)


def test_another_user_is_told_nothing(monkeypatch):
    beats = HeartbeatServer(1.0)
    beats.set_environment({"HF_TOKEN": "secret"})
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{beats.socket_name}")
        monkeypatch.setattr(heartbeat, "_get_peer_uid", lambda peer: os.geteuid() + 1)
        beats.send_heartbeats()
        stranger.settimeout(1.0)
        assert stranger.recv(1 << 10) == b""
    with pytest.raises(PermissionError, match="it belongs to another user"):
        fetch_environment(beats.socket_name, beats.token, 1.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_told_nothing_by_the_kernels_word(tmp_path):
    become = "import os, sys\nos.setuid(65534)\n"
    ask = "import sys\nfrom dstrain.launch.heartbeat import fetch_environment\nprint(fetch_environment(sys.argv[1], sys.argv[2], 5))"
    beats = HeartbeatServer(1.0)
    beats.set_environment({"HF_TOKEN": "secret"})
    with (
        beating(beats),
        start("import dstrain.launch.heartbeat\n" + become + ask, beats.socket_name, beats.token) as stranger,
    ):
        said, errors = stranger.communicate(timeout=20)
    assert stranger.returncode == 1
    assert "secret" not in said + errors
    assert "Error: it belongs to another user" in errors


def test_a_client_without_the_token_gets_beats_but_no_environment():
    """Root of another container that shares the network is the same user to the kernel, and reads the name in /proc/net/unix."""
    beats = HeartbeatServer(0.06)
    beats.set_environment({"HF_TOKEN": "secret"})
    assert beats.socket_name in Path("/proc/net/unix").read_text()
    assert beats.token not in Path("/proc/net/unix").read_text()
    for guess in (b"", b"0" * 32, beats.token.encode()[:-1], beats.socket_name.encode()):
        with socket.socket(socket.AF_UNIX) as other, beating(beats):
            other.connect(f"\0{beats.socket_name}")
            if guess:
                other.sendall(guess)
            time.sleep(0.2)
            assert set(other.recv(1 << 16)) == set(b"\n")


def test_many_who_connect_hold_nobody_up():
    beats = HeartbeatServer(0.06)
    beats.set_environment({"A": "1"})
    crowd = []
    with beating(beats):
        for _ in range(300):
            other = socket.socket(socket.AF_UNIX)
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.connect(f"\0{beats.socket_name}")
            crowd.append(other)
        assert fetch_environment(beats.socket_name, beats.token, 5) == {"A": "1"}
    for other in crowd:
        other.close()


def test_a_rank_lives_as_long_as_its_agent_beats(pair):
    _, rank = pair
    time.sleep(heartbeat.RANK_TIMEOUT_FACTOR * SILENCE + 1)
    assert rank.poll() is None


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_whose_agent_no_longer_beats_ends_itself(number, pair):
    agent, rank = pair
    began = time.monotonic()
    agent.send_signal(number)
    assert rank.wait(20) == -signal.SIGKILL
    waited = time.monotonic() - began
    said = rank.stderr.read()
    if number == signal.SIGKILL:
        assert said == "", "it does not wait for heartbeats: the end of the connection says it"
        return
    # The last heartbeat may have been late already.
    assert SILENCE < waited < heartbeat.RANK_TIMEOUT_FACTOR * SILENCE + 8
    assert said.startswith("error: the agent of this host has sent no heartbeat for 1.8 s: it is stopped, or it hangs.")


def test_a_rank_that_was_stopped_itself_goes_on(pair):
    _, rank = pair
    rank.send_signal(signal.SIGSTOP)
    time.sleep(heartbeat.RANK_TIMEOUT_FACTOR * SILENCE + 1)
    rank.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert rank.poll() is None


def test_a_rank_whose_log_hangs_ends_all_the_same():
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    with start(AGENT, "0.3") as agent:
        env = {**os.environ, "PYTHONPATH": str(ROOT), HEARTBEAT_ENV: f"{agent.stdout.readline().strip()} 0.3"}
        with subprocess.Popen([sys.executable, "-c", RANK], env=env, stdout=subprocess.PIPE, stderr=write) as rank:
            rank.stdout.readline()
            agent.send_signal(signal.SIGSTOP)
            assert rank.wait(20) == -signal.SIGKILL
        agent.kill()
    os.close(read)
    os.close(write)


def test_a_stopped_rank_does_not_hold_the_agent_up():
    beats = HeartbeatServer(0.06)
    beats.set_environment({"A": "x" * 500_000})
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(f"\0{beats.socket_name}")
        stopped.sendall(beats.token.encode())
        began = time.monotonic()
        for _ in range(2000):
            beats._next_beat_at = 0.0
            beats.send_heartbeats()
        assert time.monotonic() - began < 5
        assert sum(len(unsent) for unsent in beats._pending_bytes.values()) < 600_000


def test_the_name_says_nothing_and_lies_nowhere():
    assert HeartbeatServer(1.0).socket_name != HeartbeatServer(1.0).socket_name
    assert not Path(f"/tmp/{HeartbeatServer(1.0).socket_name}").exists()
