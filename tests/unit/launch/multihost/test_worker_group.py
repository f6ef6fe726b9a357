"""Agents and the launching side, with an `ssh` that stays on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain import __version__
from dstrain.errors import UsageError
from dstrain.launch.command import Launch
from dstrain.launch.multihost import agent_client, probe, worker_group
from dstrain.launch.multihost.agent import Agent, kill_agent
from dstrain.launch.multihost.agent_client import AgentClient, iter_host_faults
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.hostfile import parse_hostfile
from dstrain.launch.multihost.worker_group import MultiHostWorkerGroup, open_worker_group
from dstrain.launch.processes import start_time
from dstrain.launch.worker import get_workers_dir
from tests.vocabulary import wait_until
from tests.workers import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are Linux's here")

NONCE = "a1b2"


def faults(launch: Launch, run_dir: Path) -> list[str]:
    with pytest.raises(UsageError) as caught, open_worker_group(launch, run_dir):
        pass
    return str(caught.value).splitlines()


def test_all_hosts_that_cannot_be_reached_are_named_at_once(launch, tmp_path):
    began = time.monotonic()
    said = faults(launch("here slots=1\nunknown slots=1\nbare slots=1\n"), tmp_path)
    assert [line.split(": ")[0] for line in said] == ["F:2 unknown", "F:3 bare"]
    assert "Could not resolve hostname" in said[0]
    assert "`ssh unknown true` must work without a prompt" in said[0]
    assert "python: not found" in said[1]
    assert "at the same path on every host" in said[1]
    assert time.monotonic() - began < 40


def test_two_names_of_one_machine_are_found(launch, tmp_path):
    assert faults(launch("here slots=1\nalias slots=1\n"), tmp_path) == [
        "F:2 alias: is the same machine as here; name it once, with all its slots"
    ]


def test_a_host_that_greets_is_understood_and_one_host_meets_with_itself(launch, tmp_path):
    with open_worker_group(launch("chatty slots=2\n"), tmp_path) as group:
        assert isinstance(group, worker_group.MultiHostWorkerGroup)
        assert (group.use_cpu, group.is_alive(), list(group.launch.ranks)) == (True, False, [0, 1])
        assert group.kill() == []
    assert not list(get_workers_dir(tmp_path).glob("seen-*"))


def test_a_taken_port_is_found_on_the_first_host(launch, tmp_path):
    with socket.create_server(("", 0)) as server:
        said = faults(launch("here slots=1\n", master_port=server.getsockname()[1]), tmp_path)
    assert said[0].startswith("here: --master-port")
    assert f"(pid {os.getpid()})" in said[0]


def test_more_slots_than_gpus_are_refused(tmp_path):
    peer = AgentClient.__new__(AgentClient)
    peer.host = parse_hostfile("host1 slots=4\n", "F")[0]
    versions = {"dstrain": "0.0", "Python": "3.11", "torch": "2.13.0"}
    peer.host_info = {"machine": "a", "sees": False, "has_cwd": True, "versions": versions, "digests": {}, "gpus": 2}
    said = [str(fault) for _, fault in iter_host_faults([peer], tmp_path)]
    assert [line.split(";")[0].removeprefix("F:1 host1: ") for line in said] == [
        f"does not see {tmp_path}", "has dstrain 0.0, this host has " + __version__,
        "has 2 GPUs, but slot 3 is requested",
    ]  # fmt: skip


def start_request(folder: Path, argv: list[str]) -> dict[str, Any]:
    """The message that starts one rank."""
    environment = {"HF_TOKEN": "secret", "OMP_NUM_THREADS": "99", "DS_ACCELERATOR": "cpu"}
    launch = {
        "argv": argv, "environment": environment, "world_size": 2, "ranks": [1, 2], "master_addr": "10.0.0.1",
        "master_port": 29501, "devices": ["3"], "heartbeat_timeout": 30.0,
    }  # fmt: skip
    return {"launch": launch, "run_dir": str(folder), "cwd": "/"}


class Started:
    """An agent as a process, and a sleeper that it started."""

    def __init__(self, folder: Path, heartbeat_timeout: float = 30.0) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "dstrain.launch.multihost.agent", f"{heartbeat_timeout:g}", NONCE]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.line = Channel(self.process.stdout.fileno(), self.process.stdin.fileno(), heartbeat_timeout, NONCE)
        begin = "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        sleep = f"open({str(folder / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
        self.line.send(start=start_request(folder, [sys.executable, "-c", begin + sleep]))
        until = time.monotonic() + 60
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            assert time.monotonic() < until
            self.line.send_heartbeat()
            time.sleep(0.02)
        self.sleeper = psutil.Process(int((folder / "pid").read_text()))

    def gone(self, seconds: float = 15.0) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.sleeper.is_running() or self.sleeper.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.02)
        return False


@pytest.mark.parametrize("harm", ["the line is cut", "nothing is heard", "asked to end", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_an_agent(harm, tmp_path):
    started = Started(tmp_path, heartbeat_timeout=1.0 if harm == "nothing is heard" else 30.0)
    try:
        if harm == "the line is cut":
            started.process.stdin.close()
        elif harm == "asked to end":
            started.line.send(end=True)
        elif harm.startswith("SIG"):
            started.process.send_signal(getattr(signal, harm))
        assert started.gone(), harm
        assert started.process.wait(60) == {"asked to end": 0, "SIGKILL": -9}.get(harm, 1)
    finally:
        started.process.kill()


def test_a_stopped_process_is_ended_too(tmp_path):
    started = Started(tmp_path)
    started.sleeper.suspend()
    started.process.stdin.close()
    assert started.gone()
    started.process.wait(60)


RANK = """
import json, os, signal, sys, time
from pathlib import Path
from typing import Any
from dstrain.launch.worker import record_start
names = ("HF_TOKEN", "RANK", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "DSTRAIN_SUPERVISOR")
record_start(Path(sys.argv[1]), 1)
Path(sys.argv[1], "seen.new").write_text(json.dumps({name: os.environ[name] for name in names}))
os.rename(Path(sys.argv[1], "seen.new"), Path(sys.argv[1], "seen"))
time.sleep(60)
"""


def test_an_agent_gives_ranks_their_environment_and_reports_their_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ours, theirs = socket.socketpair()
    agent = Agent(Channel(theirs.fileno(), theirs.fileno(), 30.0, NONCE))
    line = Channel(ours.fileno(), ours.fileno(), 30.0, NONCE)
    monkeypatch.chdir(tmp_path)  # the agent goes to the folder of the launch
    agent.start_ranks(**start_request(tmp_path, [sys.executable, "-c", RANK, str(tmp_path)]))
    assert os.getcwd() == "/"
    wait_until((tmp_path / "seen").exists)
    found = json.loads((tmp_path / "seen").read_text())
    assert found.pop("OMP_NUM_THREADS") != "99"
    assert found == {
        "HF_TOKEN": "secret", "RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1",
        "DSTRAIN_SUPERVISOR": f"{socket.gethostname()} {os.getpid()}",
    }  # fmt: skip
    agent.report_changes()
    assert line.read_messages() == []
    agent.send_signal(signal.SIGTERM)
    messages: list[Any] = []
    until = time.monotonic() + 60
    while not messages:
        assert time.monotonic() < until
        agent.report_changes()
        messages = line.read_messages()
    rank, end = messages[0]["ended"]
    assert (rank, end["status"], end["record"]["rank"], end["record"]["exit"], end["kill_reason"]) == (
        1,
        -15,
        1,
        None,
        "",
    )
    assert agent.kill_all() == []
    for end in (ours, theirs):
        end.close()


WATCHER = """
import os, sys, time
os.environ |= {"DSTRAIN_AGENT": "0.2", "DSTRAIN_SUPERVISOR": f"{os.uname().nodename} {os.getppid()}"}
from dstrain.launch.worker import exit_with_parent
exit_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


def test_a_rank_whose_agent_is_stopped_ends_itself():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, WATCHER]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        (rank,) = psutil.Process(parent.pid).children()
        time.sleep(1.0)
        assert rank.is_running(), "as long as its agent runs"
        parent.send_signal(signal.SIGSTOP)
        wait_until(lambda: rank.status() == psutil.STATUS_ZOMBIE)
        parent.send_signal(signal.SIGCONT)
        assert "has been stopped for 0.6 s" in parent.stderr.read()


def test_rank_0_inherits_the_port_that_the_other_hosts_have_tried(tmp_path):
    """No other process can take it meanwhile, and none holds it after rank 0 has ended."""
    ours, theirs = socket.socketpair()
    agent = Agent(Channel(theirs.fileno(), theirs.fileno(), 30.0, NONCE))
    port = agent.open_listener("127.0.0.1", 0)["port"]
    assert probe.try_connect("127.0.0.1", port) == {"interface": probe.find_route_interface("127.0.0.1")}
    code = (
        "import os, socket, sys; socket.socket(fileno=int(os.environ['DSTRAIN_LISTENER'])).detach();"
        "open(sys.argv[1], 'w').write(os.environ['MASTER_PORT']); sys.stdin.read()"
    )
    message = start_request(
        tmp_path, [sys.executable, "-c", f"{code}; import time; time.sleep(60)", str(tmp_path / "port")]
    )
    message["launch"] |= {"ranks": [0, 1], "master_addr": "127.0.0.1", "master_port": port}
    agent.start_ranks(**message | {"cwd": os.getcwd()})
    wait_until(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text())
    assert (tmp_path / "port").read_text() == str(port)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    assert agent.kill_all() == []
    assert probe.try_connect("127.0.0.1", port) == {"fault": "Connection refused"}
    for end in (ours, theirs):
        end.close()


SESSIONS = """
import sys, time
from pathlib import Path
from dstrain.launch.multihost.agent_client import open_agents
from dstrain.launch.multihost.hostfile import Host
with open_agents([Host("here", (0,)), Host("chatty", (0,))], Path(sys.argv[1]), 30.0) as clients:
    print(*(client.process.pid for client in clients), flush=True)
    time.sleep(60)
"""


def test_sessions_end_with_a_killed_launch(launch, tmp_path):
    """By the end of their input: nothing is set in the child, which would fork a copy of this process for each host."""
    with subprocess.Popen(
        [sys.executable, "-c", SESSIONS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as started:
        sessions = [psutil.Process(int(pid)) for pid in started.stdout.readline().split()]
        assert len(sessions) == 2
        started.kill()
    wait_until(lambda: all(over(session) for session in sessions))


def test_what_a_host_reaches_it_names_the_way_of(monkeypatch):
    monkeypatch.setattr(probe, "get_interfaces_by_address", lambda: {"127.0.0.1": "eth1", "10.0.0.1": "eth0"})
    assert probe.find_route_interface("127.0.0.1") == probe.find_route_interface("localhost") == "eth1"
    monkeypatch.setattr(probe, "get_interfaces_by_address", lambda: {"10.0.0.1": "eth0", "fd00::1": "eth0"})
    assert probe.find_route_interface("127.0.1.1") == "eth0", "its own name, on Debian: the only interface there is"


def test_a_host_that_is_not_there_is_said_to_be_silent(monkeypatch):
    monkeypatch.setattr(probe, "get_interfaces_by_address", lambda: {"10.0.0.1": "eth0", "10.1.0.1": "eth1"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe.try_connect("127.0.0.1", port) == {"interface": ""}  # loopback is no interface to others
    assert probe.try_connect("127.0.0.1", port) == {"fault": "Connection refused"}
    assert "fault" in probe.try_connect("no.such.host.invalid", 1)


# Cleanup over ssh on a host whose agent does not answer.


def agent_of(nonce: str) -> psutil.Process:
    def words(process: psutil.Process) -> list[str]:
        with contextlib.suppress(psutil.Error):
            return process.cmdline()
        return []

    (found,) = (process for process in psutil.process_iter() if {nonce, agent_client.AGENT_MODULE} <= {*words(process)})
    return found


def stop_agent(group: MultiHostWorkerGroup, index: int = 0) -> psutil.Process:
    """Stop it, and have it given up half a second later."""
    agent = agent_of(group._clients[index].nonce)
    agent.suspend()
    group._clients[index].channel.heartbeat_timeout = 0.5
    group._has_started = True
    until = time.monotonic() + 60
    while not group.abort_reason:
        assert time.monotonic() < until
        group.poll()
        time.sleep(0.02)
    return agent


def over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stopped_agent_and_its_ranks_are_ended_over_another_session(stopped, launch, tmp_path):
    sleep = "import os, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    argv = [sys.executable, "-c", sleep, str(tmp_path / "pid")]
    with open_worker_group(replace(launch("here slots=2\n"), argv=argv), tmp_path) as group:
        group.start()
        files, until = [tmp_path / f"pid{rank}" for rank in range(2)], time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < until
            group.poll()
            time.sleep(0.02)
        ranks = [psutil.Process(int(file.read_text())) for file in files]
        if stopped:
            ranks[1].suspend()
        agent = stop_agent(group)
        assert group.kill() == []
        assert all(over(process) for process in (agent, *ranks))
    assert group.abort_reason == (
        "here sent no message for 0.5 s (power, network, or a suspended process or machine); rank 0, 1 ran there; "
        "nothing of the launch is left there; start the same command again to resume"
    )


@contextlib.contextmanager
def killed_without_agent(group, tmp_path, ssh):
    """Stop the agent, make every further ssh run this shell command, and kill the job."""
    agent = stop_agent(group)
    (tmp_path / "bin/ssh").write_text(f"#!/bin/sh\n{ssh}\n")
    started_at = time.monotonic()
    group.kill()
    assert time.monotonic() - started_at < 5
    yield
    agent.resume()


def test_where_ssh_does_not_answer_the_sentence_says_so(launch, tmp_path):
    with (
        open_worker_group(launch("here slots=2\n"), tmp_path) as group,
        killed_without_agent(group, tmp_path, "exit 255"),
    ):
        assert group.abort_reason.endswith(
            "; rank 0, 1 ran there; rank 0, 1 on here cannot be ended from here: where it still runs, it ends by itself "
            "within 20 s; wait for that, then start the same command again to resume"
        )


def test_a_host_that_never_answers_is_not_waited_for_without_end(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_group, "CLEANUP_TIMEOUT_SECONDS", 0.5)
    endless = "while :; do echo y; done"
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group, killed_without_agent(group, tmp_path, endless):
        assert "cannot be ended from here" in group.abort_reason


def test_an_agent_that_is_stopped_only_at_the_end_is_ended_too(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("dstrain.launch.multihost.worker_group.KILL_TIMEOUT_SECONDS", 0.5)
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group:
        group._has_started = True
        agent = agent_of(group._clients[0].nonce)
        agent.suspend()
        assert group.kill() == []
        assert over(agent)
    assert group.abort_reason == ""


def test_a_process_that_stood_still_itself_says_so(launch, tmp_path):
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group:
        group._last_poll_at = time.monotonic() - 7.0
        group.poll()
        agent_of(group._clients[0].nonce).kill()
        while not group.abort_reason:
            group.poll()
            time.sleep(0.02)
        assert (
            "; this process itself did not run for 7 s (SIGSTOP, Ctrl-Z, or a machine that slept); rank 0"
            in group.abort_reason
        )


def test_the_reason_another_launch_left_stays_as_it_is(launch, tmp_path):
    """A sentence that something else left there, such as the lease of the run folder, stays as it is."""
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group:
        group.abort_reason = "another launch took the folder"
        group.kill()
        assert group.abort_reason == "another launch took the folder"


def test_the_end_of_a_killed_agents_number_is_none_of_a_later_process():
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        assert kill_agent(other.pid, "1") == []
        assert other.poll() is None
        assert kill_agent(other.pid, start_time(other.pid)) == []
        assert other.wait(60) == -signal.SIGKILL
