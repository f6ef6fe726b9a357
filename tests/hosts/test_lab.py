"""The hosts of these tests are separate hosts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.lab import Lab, wait_for

pytestmark = pytest.mark.hosts
TRY = ["ssh", "-o", "ConnectTimeout=1", "host2", "true"]


def test_hosts_know_each_other_by_name_and_nothing_else(lab: Lab) -> None:
    assert lab.run(1, ["ssh", "host2", "hostname -I; hostname"]) == (0, f"{lab.address(2)} \nhost2\n")
    assert lab.run(2, ["ssh", "host1", "hostname"]) == (0, "host1\n")
    assert "Could not resolve hostname" in lab.run(1, ["ssh", "host9", "true"])[1]
    assert lab.left(within=20.0) == [], "sshd's end of a connection may outlast the client's for a moment"


def test_a_command_gets_signals_and_tells_how_it_ended(lab: Lab) -> None:
    job = lab.start(1, ["sh", "-c", "trap 'echo told; exit 7' INT; echo ready; sleep 60"])
    wait_for(lambda: "ready" in job.output(), 20, "it did not start")
    # The shell says that it is ready before it starts `sleep`.
    both = [(1, "S", "sh"), (1, "S", "sleep")]
    wait_for(lambda: [(one.host, one.state, one.command.split()[0]) for one in lab.left()] == both, 20, "not two")
    job.signal(signal.SIGINT, group=True)
    assert (job.wait(20), job.output()) == (7, "ready\ntold\n")
    job = lab.start(2, ["sleep", "60"])
    wait_for(lambda: lab.find(2, "^sleep 60"), 20, "it did not start")
    assert len(lab.kill(2, "^sleep", signal.SIGKILL)) == 1
    assert job.wait(20) == -signal.SIGKILL
    assert lab.left() == []


def test_a_cut_connection_leaves_what_ran_in_it(lab: Lab) -> None:
    job = lab.start(1, ["ssh", "host2", "sleep 60"])
    wait_for(lambda: lab.find(2, "^sleep"), 20, "it did not start")
    assert lab.cut_ssh(2)
    assert job.wait(20) == 255
    wait_for(lambda: [process.command for process in lab.left()] == ["sleep 60"], 20, "more than it is left")
    time.sleep(0.5)
    assert [process.command for process in lab.left()] == ["sleep 60"]


def test_a_host_can_be_cut_off_and_come_back(lab: Lab) -> None:
    for cut, mend in (
        (lambda: lab.link(2, False), lambda: lab.link(2, True)),
        (lambda: lab.drop(2, True), lambda: lab.drop(2, False)),
        (lambda: lab.poweroff(2), lambda: lab.boot(2)),
    ):
        cut()
        assert lab.run(1, TRY)[0] == 255
        mend()
        # On a busy machine a greeting alone may take longer than TRY waits.
        wait_for(lambda: lab.run(1, TRY) == (0, ""), 30, "it did not come back")


def test_files_are_shared_unless_one_says_otherwise(lab: Lab, tmp_path: Path) -> None:
    lab.keep_apart(2, tmp_path / "apart")
    for host in lab.numbers:
        assert lab.run(host, ["touch", str(tmp_path / f"shared-{host}"), str(tmp_path / f"apart/host{host}")])[0] == 0
    assert {path.name for path in tmp_path.glob("shared-*")} == {"shared-1", "shared-2"}
    assert [lab.run(host, ["ls", str(tmp_path / "apart")])[1] for host in lab.numbers] == ["host1\n", "host2\n"]


def test_what_would_be_killed_by_name_is_written_down(lab: Lab) -> None:
    job = lab.start(2, ["sleep", "61"])
    wait_for(lambda: lab.find(2, "^sleep 61"), 20, "it did not start")
    lab.run(1, ["ssh", "host2", "pkill -f '^sleep 61'"])
    assert job.wait(20) == -signal.SIGTERM
    assert [line.split(" ", 1)[1] for line in lab.pkills()] == ["host2 pkill -f ^sleep 61"]


def test_hosts_may_take_their_own_name_for_loopback(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(style="debian")
    assert lab.run(1, ["getent", "ahostsv4", "host1"])[1].split()[0] == "127.0.1.1"
    assert lab.run(2, ["getent", "ahostsv4", "host1"])[1].split()[0] == lab.address(1)


def test_two_labs_do_not_meet_and_leave_nothing(lab: Lab, tmp_path: Path) -> None:
    with Lab(tmp_path / "other") as other:
        inside = other.start(1, ["ssh", "host2", "sleep 60"])
        wait_for(lambda: other.find(2, "^sleep"), 20, "it did not start")
        assert lab.left() == []
        alive = [process.outside for process in other.left()]
    assert inside.code is not None
    assert not [pid for pid in alive if os.path.exists(f"/proc/{pid}")]
    assert str(tmp_path / "other") not in Path("/proc/self/mounts").read_text()
    wait_for(lambda: lab.run(1, TRY) == (0, ""), 30, "the first lab is hurt")
