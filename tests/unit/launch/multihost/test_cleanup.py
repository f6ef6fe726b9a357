"""Cleanup over ssh on a host whose agent does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dstrain.launch.multihost import worker_group as cleanup
from dstrain.launch.multihost.worker_group import MultiHostWorkerGroup, open_worker_group
from dstrain.launch.processes import find_processes
from dstrain.launch.worker_group import LauncherSpec, LocalWorkerGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are Linux's here")


def agent_of(nonce: str) -> psutil.Process:
    (found,) = find_processes(lambda words, env: cleanup.is_of_launch(words, env, "no launch file", nonce))
    return found


def stop_agent(group: MultiHostWorkerGroup, index: int = 0) -> psutil.Process:
    """Stop it, and have it given up half a second later."""
    agent = agent_of(group._clients[index].nonce)
    agent.suspend()
    group._clients[index].channel.peer_timeout = 0.5
    group._has_started = True
    until = time.monotonic() + 10
    while not group.abort_reason:
        assert time.monotonic() < until
        group.poll()
        time.sleep(0.02)
    return agent


def over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stopped_agent_and_its_ranks_are_ended_over_another_session(stopped, launch, tmp_path):
    with open_worker_group(launch("here slots=2\n"), tmp_path) as group:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(group._launch_file)]) as rank:
            if stopped:
                rank.send_signal(signal.SIGSTOP)
            agent = stop_agent(group)
            assert group.kill() == []
            assert rank.wait(5) == -signal.SIGKILL
        assert over(agent)
    assert group.abort_reason == (
        "here sent no message for 0.5 s (power, network, or a suspended process or machine); rank 0, 1 ran there; "
        "nothing of the launch is left there; start the same command again to resume"
    )


def test_the_end_of_the_starter_is_none_of_the_session_that_cleans_up(launch, tmp_path):
    """It ends whatever this process started since: DeepSpeed's runner, pdsh and what they left."""
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group:
        group._runner = LocalWorkerGroup(LauncherSpec(["sleep", "60"], dict(os.environ)), tmp_path, ())
        group._runner.start()
        agent = stop_agent(group)
        group.kill()
        assert over(agent)
    assert group.abort_reason.endswith("; nothing of the launch is left there; start the same command again to resume")


def test_a_starter_that_does_not_end_with_the_ranks_is_not_waited_for(launch, tmp_path, monkeypatch):
    """A login script's own process holds the session open that pdsh waits for."""
    monkeypatch.setattr("dstrain.launch.multihost.worker_group.RUNNER_EXIT_SECONDS", 0.3)
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group:
        group._runner = LocalWorkerGroup(LauncherSpec(["sleep", "60"], dict(os.environ)), tmp_path, ())
        group._runner.start()
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            assert group.poll_launcher() is None
        group.exit_codes[0] = 0
        assert group.poll_launcher() is None
        time.sleep(0.4)
        assert group.poll_launcher() == 1
        assert group.kill() == []
        assert not group.is_alive()


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
    monkeypatch.setattr(cleanup, "CLEANUP_TIMEOUT_SECONDS", 0.5)
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
        assert (
            "; this process itself did not run for 7 s (SIGSTOP, Ctrl-Z, or a machine that slept); rank 0"
            in group.abort_reason
        )


def test_another_launchs_loss_is_not_embroidered(launch, tmp_path):
    """A sentence that something else left there, such as the lease of the run folder, stays as it is."""
    with open_worker_group(launch("here slots=1\n"), tmp_path) as group:
        group.abort_reason = "another launch took the folder"
        group.kill()
        assert group.abort_reason == "another launch took the folder"


def test_only_exact_words_of_an_agents_command_line_count():
    nonce = "0a1b2c3d4e5f6071"
    agent = ["python", "-m", cleanup.AGENT_MODULE, "20", nonce]
    assert cleanup.is_of_launch(agent, dict, "/run/launch", nonce)
    for words in (["sleep", "60", nonce], [*agent[:-1], f"{nonce}0"], ["sh", "-c", " ".join(agent)]):
        assert not cleanup.is_of_launch(words, dict, "/run/launch", nonce)
