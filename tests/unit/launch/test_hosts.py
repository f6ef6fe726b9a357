"""Launches on several hosts, with an `ssh` that stays on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain.errors import UsageError
from dstrain.launch import hosts, probe
from dstrain.launch.host_worker import MESSAGE_MARK, MessagePipe
from dstrain.launch.hostfile import parse_hostfile
from dstrain.launch.hosts import HostSession, MultiHostWorkerGroup, iter_host_faults, open_worker_group
from dstrain.launch.plan import Launch
from dstrain.launch.probe import hash_source_tree, iter_version_diffs, read_package_versions
from dstrain.launch.supervise import supervise
from dstrain.launch.worker import get_workers_dir, remove_worker_files
from tests.vocabulary import wait_until
from tests.workers import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are Linux's here")


def faults(launch: Launch, run_dir: Path) -> list[str]:
    with pytest.raises(UsageError) as caught, open_worker_group(launch, run_dir):
        pass
    return str(caught.value).splitlines()


# Before the ranks start.


def test_all_hosts_that_cannot_be_reached_are_named_at_once(launch, tmp_path):
    said = faults(launch("here slots=1\nunknown slots=1\nbare slots=1\n"), tmp_path)
    assert [line.split(": ")[0] for line in said] == ["F:2 unknown", "F:3 bare"]
    assert "Could not resolve hostname" in said[0]
    assert "`ssh unknown true` must work without a prompt" in said[0]
    assert "python: not found" in said[1]
    assert "at the same path on every host" in said[1]


def test_two_names_of_one_machine_are_found(launch, tmp_path):
    assert faults(launch("here slots=1\nalias slots=1\n"), tmp_path) == [
        "F:2 alias: is the same machine as here; name it once, with all its slots"
    ]


def test_a_host_that_greets_is_understood_and_one_host_meets_with_itself(launch, tmp_path):
    with open_worker_group(launch("chatty slots=2\n"), tmp_path) as group:
        assert isinstance(group, MultiHostWorkerGroup)
        assert (group.use_cpu, group.is_alive(), list(group.launch.ranks)) == (True, False, [0, 1])
        assert group.kill() == []
    assert not list(get_workers_dir(tmp_path).glob("seen-*"))


def test_a_taken_port_is_found_on_the_first_host(launch, tmp_path):
    with socket.create_server(("", 0)) as server:
        said = faults(launch("here slots=1\n", master_port=server.getsockname()[1]), tmp_path)
    assert said[0].startswith("here: --master-port")
    assert f"(pid {os.getpid()})" in said[0]


def session(name: str, slots: int = 1, **info: Any) -> HostSession:
    """A host that has answered."""
    made = HostSession.__new__(HostSession)
    made.host = parse_hostfile(f"{name} slots={slots}\n", "F")[0]
    software = {"versions": read_package_versions(), "code": hash_source_tree()}
    made.info = {"machine": name, "sees": True, "has_cwd": True, "gpus": 0, **software, **info}
    return made


def test_hosts_that_do_not_fit_together_are_refused_by_name(tmp_path):
    own = read_package_versions()
    other = {"versions": own | {"torch": "1.13.1", "peft": ""}, "code": "0" * 12}
    found = iter_host_faults([session("a"), session("b", 4, sees=False, gpus=2, **other)], tmp_path)
    assert [str(fault).split(";")[0] for _, fault in found if "F:1 b: " in str(fault)] == [
        f"F:1 b: does not see {tmp_path}",
        f"F:1 b: has torch 1.13.1, a has {own['torch']}",
        f"F:1 b: has peft none, a has {own['peft']}",
        f"F:1 b: has other code of dstrain {own['dstrain']} than this host",
        "F:1 b: has 2 GPUs, but slot 3 is requested",
    ]


def test_versions_are_told_without_importing_anything_heavy():
    assert set(read_package_versions()) == {"Python", "dstrain", "torch", "deepspeed", "transformers", "peft"}
    assert list(iter_version_diffs({"a": "1", "b": "2"}, {"a": "1"})) == [("b", "2", "none")]
    assert len(hash_source_tree()) == 12


SCRIPTS = {
    "no line break": "printf hello",
    "a terminal title": r'echo -ne "\033]0;$HOSTNAME\007"',
    "JSON": """echo '{"reply": {}}'; printf '{"reply": '""",
    "ten megabytes": "head -c 10000000 /dev/zero | tr '\\0' x",
    "bytes": "head -c 100000 /dev/urandom; head -c 100000 /dev/urandom >&2",
    "slow": "sleep 2",
    "strict": "set -e; set -u; set -o pipefail",
    "aliases": "shopt -s expand_aliases; alias exec='echo no' env='echo no' python='echo no'; exec() { echo no; }",
    "a process that goes on printing": "(while sleep 0.05; do printf noise; done) &",
    "reads": "read -t 1 line",
    "at the end": "trap 'echo bye; echo bye >&2' EXIT",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_login_script_may_print_what_it_likes(script, launch, login_script, tmp_path):
    login_script.write_text(f"{script}\n")
    argv = [sys.executable, "-c", "pass"]
    with open_worker_group(replace(launch("login slots=2\n"), argv=argv), tmp_path) as group:
        group.start()
        wait_until(lambda: group.poll() or not group.alive_ranks)
        assert (group.kill(), group.abort_reason) == ([], "")
        assert [group.ends[rank].status for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize("script", ["exit 1", "echo over >&2; exec false", "echo over >&2; kill -9 $$"])
def test_a_login_script_that_ends_the_shell_is_named(script, launch, login_script, tmp_path):
    login_script.write_text(f"{script}\n")
    (said,) = faults(launch("login slots=2\n"), tmp_path)
    code, why = ("-9", "over") if "kill" in script else ("1", "no message" if script == "exit 1" else "over")
    assert said == (
        f"F:1 login: its login shell or dstrain ended with code {code} before it answered ({why}); "
        "`ssh login true; echo $?` must print 0: check the login scripts there, such as ~/.bashrc"
    )


def test_a_login_script_that_does_not_end_is_named(launch, login_script, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "ANSWER_TIMEOUT_SECONDS", 1.0)
    login_script.write_text("while :; do echo y; done\n")
    (said,) = faults(launch("login slots=2\n"), tmp_path)
    assert said.startswith("F:1 login: does not answer in time; `ssh login true` must end without a prompt")


def test_the_reason_is_what_ssh_said(launch, tmp_path):
    said = faults(launch("denied slots=1\nmute slots=1\n"), tmp_path)
    assert "denied: cannot be reached by ssh (me@denied: Permission denied (publickey).)" in said[0]
    assert "the network (also its MTU)" in said[0]
    assert "mute: cannot be reached by ssh (no message)" in said[1]


def test_the_next_launch_removes_what_a_killed_one_left(tmp_path):
    folder = get_workers_dir(tmp_path)
    folder.mkdir()
    for name in ("seen-0123", "rank-00000.json", "status-0123"):
        (folder / name).write_text("{}")
    remove_worker_files(tmp_path, [1])
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.json", "status-0123"]


def test_the_interface_to_a_host_is_found(monkeypatch):
    monkeypatch.setattr(probe, "get_interfaces_by_address", lambda: {"127.0.0.1": "eth1", "10.0.0.1": "eth0"})
    assert probe.find_route_interface("127.0.0.1") == probe.find_route_interface("localhost") == "eth1"
    monkeypatch.setattr(probe, "get_interfaces_by_address", lambda: {"10.0.0.1": "eth0", "fd00::1": "eth0"})
    assert probe.find_route_interface("127.0.1.1") == "eth0", "its own name, on Debian: the only interface there is"


def test_a_port_that_does_not_answer_is_a_fault(monkeypatch):
    monkeypatch.setattr(probe, "get_interfaces_by_address", lambda: {"10.0.0.1": "eth0", "10.1.0.1": "eth1"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe.try_connect("127.0.0.1", port) == {"interface": ""}  # loopback is no interface to others
    assert probe.try_connect("127.0.0.1", port) == {"fault": "Connection refused"}
    assert "fault" in probe.try_connect("no.such.host.invalid", 1)


# Messages on a stream with other output.

NOISE = {
    "a line": b"welcome\n",
    "no line break": b"hello",
    "JSON": b'{"reply": {}}\n{"remaining": []}\n',
    "half JSON": b'{"reply": ',
    "a mark and no JSON": b"\n" + MESSAGE_MARK + b"{\n",
    "bytes": bytes(range(256)) * 8,
    "ten megabytes of one line": b"x" * 10_000_000,
    "a million lines": b"\n" * 1_000_000,
}


@pytest.fixture
def pipe() -> Iterator[tuple[MessagePipe, Callable[[bytes], None]]]:
    """A pipe of messages, and what writes bytes into it and has them read."""
    read_fd, write_fd = os.pipe()
    messages = MessagePipe(read_fd, write_fd)

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(write_fd, data) :]
            messages.receive()

    yield messages, write
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_message_is_found_in_other_output(noise, pipe):
    messages, write = pipe
    sent = {"ended": [3, {"status": 1, "record": {"error": "ü\n" * 1000}}]}
    write(noise)
    messages.send(**sent)
    write(noise)
    messages.receive()
    assert [*messages.received] == [sent]


def test_the_end_of_the_other_side_is_seen_after_its_last_message():
    read_fd, write_fd = os.pipe()
    messages = MessagePipe(read_fd, write_fd)
    messages.send(remaining=[])
    os.close(write_fd)
    wait_until(lambda: messages.receive() or messages.closed)
    assert [*messages.received] == [{"remaining": []}]
    os.close(read_fd)


# The ranks of a host.

RANK = """
import json, os, sys, time
from pathlib import Path
from dstrain.launch.worker import exit_with_parent, record_start
exit_with_parent()
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
record_start(folder / "run", rank)
names = ("HF_TOKEN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "DSTRAIN_LISTENER", "OMP_NUM_THREADS")
seen = {name: os.environ.get(name) for name in names} | {"pid": os.getpid(), "cwd": os.getcwd()}
Path(folder, f"new{rank}").write_text(json.dumps(seen))
os.rename(folder / f"new{rank}", folder / f"seen{rank}")
time.sleep(60)
"""


class Ranks:
    """Two ranks on one host, which sleep."""

    def __init__(self, launch: Launch, folder: Path, group: MultiHostWorkerGroup) -> None:
        self.group = group
        group.start()
        files = [folder / f"seen{rank}" for rank in range(2)]
        wait_until(lambda: group.poll() or all(file.exists() for file in files))
        self.seen = [json.loads(file.read_text()) for file in files]
        self.processes = [psutil.Process(seen["pid"]) for seen in self.seen]
        self.host_worker = self.processes[0].parent()

    def have_ended(self) -> bool:
        return all(is_over(process) for process in (*self.processes, self.host_worker))


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def ranks(launch, tmp_path) -> Iterator[Ranks]:
    ready = replace(launch("here slots=2\n"), argv=[sys.executable, "-c", RANK, str(tmp_path)], heartbeat_timeout=3.0)
    with open_worker_group(ready, tmp_path / "run") as group:
        yield Ranks(ready, tmp_path, group)


def test_a_rank_gets_the_environment_and_no_file_has_it(ranks, tmp_path):
    for rank, seen in enumerate(ranks.seen):
        assert (seen["HF_TOKEN"], seen["RANK"], seen["LOCAL_RANK"]) == ("secret", str(rank), str(rank))
        assert (seen["WORLD_SIZE"], seen["cwd"]) == ("2", os.getcwd())
        assert seen["OMP_NUM_THREADS"].isdecimal()
    assert "secret" not in " ".join(ranks.host_worker.cmdline())
    assert ranks.group.kill() == []
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in kept if b"secret" in path.read_bytes()]


def test_rank_0_inherits_the_port_that_the_other_hosts_have_tried(ranks):
    """No other process can take it meanwhile, and none holds it after rank 0 has ended."""
    port = int(ranks.seen[0]["MASTER_PORT"])
    assert (ranks.seen[0]["DSTRAIN_LISTENER"] is None, ranks.seen[1]["DSTRAIN_LISTENER"]) == (False, None)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((ranks.group.launch.master_addr, port))
    assert ranks.group.kill() == []
    assert probe.try_connect(ranks.group.launch.master_addr, port) == {"fault": "Connection refused"}


def test_a_signal_reaches_the_ranks_and_their_ends_are_reported(ranks):
    assert ranks.group.send_signal(signal.SIGTERM) == 2
    wait_until(lambda: ranks.group.poll() or not ranks.group.alive_ranks)
    ends = [ranks.group.ends[rank] for rank in (0, 1)]
    assert [(end.status, end.record.rank, end.record.exit) for end in ends] == [(-15, 0, None), (-15, 1, None)]
    assert (ranks.group.kill(), ranks.group.abort_reason) == ([], "")
    wait_until(ranks.have_ended)


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_after_a_kill(stopped, ranks):
    if stopped:
        ranks.processes[1].suspend()
    assert ranks.group.kill() == []
    wait_until(ranks.have_ended)


def test_a_killed_host_worker_takes_its_ranks_along(ranks):
    ranks.host_worker.kill()
    wait_until(ranks.have_ended)
    wait_until(lambda: ranks.group.poll() or ranks.group.abort_reason)
    assert ranks.group.abort_reason.startswith("the ssh session to here ended with code ")
    assert ranks.group.abort_reason.endswith(
        "; rank 0, 1 ran there. What still runs on here ends by itself within 3 s; start the same command again then to resume"
    )


@pytest.mark.slow
def test_a_stopped_host_worker_is_ended_by_its_ranks(ranks):
    ranks.host_worker.suspend()
    wait_until(ranks.have_ended)
    wait_until(lambda: ranks.group.poll() or ranks.group.abort_reason)
    assert ranks.group.abort_reason.startswith("the ssh session to here ended with code ")


@pytest.mark.slow
def test_ranks_end_where_the_launching_process_is_silent(ranks):
    time.sleep(1.0)
    assert not ranks.have_ended()
    wait_until(ranks.have_ended)  # nobody polls the group meanwhile
    wait_until(lambda: ranks.group.poll() or ranks.group.abort_reason)
    assert ranks.group.abort_reason.startswith(
        "here heard nothing from the launching process for 3 s: it was suspended"
    )


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_the_exit_code(launch, tmp_path, capfd):
    code = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '0' else sys.exit('no luck')"
    ready = replace(launch("here slots=2\n"), argv=[sys.executable, "-c", code])
    with open_worker_group(ready, tmp_path) as group:
        assert supervise(group) == 1
    said = capfd.readouterr().err
    assert "dstrain: rank 1 ended with code 1" in said
    assert "no luck" in said


LAUNCH = """
import sys, time
from pathlib import Path
from dstrain.launch.hostfile import Host
from dstrain.launch.hosts import open_sessions
with open_sessions([Host("here", (0,)), Host("chatty", (0,))], Path(sys.argv[1]), 30.0) as sessions:
    print("open", flush=True)
    time.sleep(60)
"""


def test_sessions_end_with_a_killed_launch(launch, tmp_path):
    """By the end of their input: nothing is set in the child, which would fork a copy of this process for each host."""
    with subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path)], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline() == "open\n"
        sessions = psutil.Process(started.pid).children(recursive=True)
        assert len(sessions) >= 2
        started.kill()
    wait_until(lambda: all(is_over(one) for one in sessions))


# A rank whose parent is stopped.

WATCHER = """
import os, sys, time
os.environ |= {"DSTRAIN_HOST_TIMEOUT": "0.4", "DSTRAIN_SUPERVISOR": f"{os.uname().nodename} {os.getppid()}"}
from dstrain.launch.worker import exit_with_parent
exit_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


def test_a_rank_ends_itself_and_its_stopped_parent():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, WATCHER]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        (rank,) = psutil.Process(parent.pid).children()
        time.sleep(1.0)
        assert rank.is_running(), "as long as its parent runs"
        parent.send_signal(signal.SIGSTOP)
        assert parent.wait(20) == -signal.SIGKILL
        wait_until(lambda: is_over(rank))
        assert "has been stopped for 0.4 s" in parent.stderr.read()
