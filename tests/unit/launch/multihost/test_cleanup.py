"""A host that was given up and answers ssh all the same: what is left of the launch there is ended before anything is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dstrain.launch.job import LocalCrew, Program
from dstrain.launch.multihost import cleanup
from dstrain.launch.multihost.job import HostsCrew, gathered

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are Linux's here")


def agent_of(nonce: str) -> psutil.Process:
    (found,) = cleanup._agents(nonce)
    return found


def stop_agent(crew: HostsCrew, index: int = 0) -> psutil.Process:
    """Stop it, and have it given up half a second later."""
    agent = agent_of(crew._peers[index].nonce)
    agent.suspend()
    crew._peers[index].line.patience = 0.5
    crew._started = True
    until = time.monotonic() + 10
    while not crew.lost:
        assert time.monotonic() < until
        crew.look()
        time.sleep(0.02)
    return agent


def over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("stopped", [False, True])
def test_a_stopped_agent_and_its_ranks_are_ended_over_another_session(stopped, launch, tmp_path):
    with gathered(launch("here slots=2\n"), tmp_path) as crew:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(crew._file)]) as rank:
            if stopped:
                rank.send_signal(signal.SIGSTOP)
            agent = stop_agent(crew)
            assert crew.end() == []
            assert rank.wait(5) == -signal.SIGKILL
        assert over(agent)
    assert crew.lost == (
        "here said nothing for 0.5 s (power, network, or a process or machine that stands still); rank 0, 1 ran there; "
        "nothing of the launch is left there; start the same command again to go on"
    )


def test_the_end_of_the_starter_is_none_of_the_session_that_cleans_up(launch, tmp_path):
    """It ends whatever this process started since: DeepSpeed's runner, pdsh and what they left."""
    with gathered(launch("here slots=1\n"), tmp_path) as crew:
        crew._starter = LocalCrew(Program(["sleep", "60"], dict(os.environ)), tmp_path, ())
        crew._starter.start()
        agent = stop_agent(crew)
        crew.end()
        assert over(agent)
    assert crew.lost.endswith("; nothing of the launch is left there; start the same command again to go on")


def test_a_starter_that_does_not_end_with_the_ranks_is_not_waited_for(launch, tmp_path, monkeypatch):
    """A login script's own process holds the session open that pdsh waits for."""
    monkeypatch.setattr("dstrain.launch.multihost.job.STARTER_SECONDS", 0.3)
    with gathered(launch("here slots=1\n"), tmp_path) as crew:
        crew._starter = LocalCrew(Program(["sleep", "60"], dict(os.environ)), tmp_path, ())
        crew._starter.start()
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            assert crew.over() is None
        crew.ends[0] = 0
        assert crew.over() is None
        time.sleep(0.4)
        assert crew.over() == 1
        assert crew.end() == []
        assert not crew.left()


def test_where_ssh_does_not_answer_the_sentence_says_so(launch, tmp_path):
    with gathered(launch("here slots=2\n"), tmp_path) as crew:
        agent = stop_agent(crew)
        (tmp_path / "bin/ssh").write_text("#!/bin/sh\nexit 255\n")
        began = time.monotonic()
        crew.end()
        assert time.monotonic() - began < 5
        assert crew.lost.endswith(
            "; rank 0, 1 ran there; rank 0, 1 on here cannot be ended from here: where it still runs, it ends by itself "
            "within 20 s; wait for that, then start the same command again to go on"
        )
        agent.resume()


def test_a_host_that_never_answers_is_not_waited_for_without_end(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(cleanup, "CLEANUP_SECONDS", 0.5)
    with gathered(launch("here slots=1\n"), tmp_path) as crew:
        agent = stop_agent(crew)
        (tmp_path / "bin/ssh").write_text("#!/bin/sh\nwhile :; do echo y; done\n")
        began = time.monotonic()
        crew.end()
        assert time.monotonic() - began < 5
        assert "cannot be ended from here" in crew.lost
        agent.resume()


def test_an_agent_that_is_stopped_only_at_the_end_is_ended_too(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("dstrain.launch.multihost.job.END_SECONDS", 0.5)
    with gathered(launch("here slots=1\n"), tmp_path) as crew:
        crew._started = True
        agent = agent_of(crew._peers[0].nonce)
        agent.suspend()
        assert crew.end() == []
        assert over(agent)
    assert crew.lost == ""


def test_a_process_that_stood_still_itself_says_so(launch, tmp_path):
    with gathered(launch("here slots=1\n"), tmp_path) as crew:
        crew._looked_at -= 7.0
        crew.look()
        agent_of(crew._peers[0].nonce).kill()
        while not crew.lost:
            crew.look()
        assert (
            "; this process itself did not run for 7 s (SIGSTOP, Ctrl-Z, or a machine that slept); rank 0" in crew.lost
        )


def test_another_launchs_loss_is_not_embroidered(launch, tmp_path):
    """A sentence that something else left there, such as the lease of the run folder, stays as it is."""
    with gathered(launch("here slots=1\n"), tmp_path) as crew:
        crew.lost = "another launch took the folder"
        crew.end()
        assert crew.lost == "another launch took the folder"


def test_only_exact_words_of_an_agents_command_line_count():
    nonce = "0a1b2c3d4e5f6071"
    with subprocess.Popen(["sleep", "60", nonce], stderr=subprocess.DEVNULL) as other:
        assert cleanup._agents(nonce) == []
        other.kill()
