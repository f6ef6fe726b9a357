"""Signals: before the first step, in training, twice, after nohup, and after the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import RunError
from dstrain.training.health import signals
from dstrain.training.health.signals import STOP_SIGNALS, GracePeriod, SignalHandler, StoppedBySignal, run_with_signals
from tests.workers import ROOT


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_in_training_a_signal_is_noted(number: signal.Signals) -> None:
    with SignalHandler() as handler:
        handler.begin_training()
        send(number)
        assert handler.received_signal == number.name


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_before_the_first_step_it_ends_the_work_and_75_means_that_there_is_a_checkpoint(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(handler: SignalHandler) -> int:
        try:
            send(number)
        except Exception:
            pytest.fail("loading took the signal for an error of its own")
        return 0

    said = f"stopped by {number.name} before the first step; rerun the same command"
    with pytest.raises(RunError) as raised, SignalHandler() as handler:
        run_with_signals(work, handler, tmp_path)
    assert str(raised.value) == said
    monkeypatch.setattr(
        signals, "find_latest_complete", lambda folder: mock.Mock() if folder == tmp_path / "checkpoints" else None
    )
    with SignalHandler() as handler:
        assert run_with_signals(work, handler, tmp_path) == 75
    assert capsys.readouterr().out == said + "\n"


def test_a_signal_that_something_swallowed_still_stops_before_the_first_step() -> None:
    with SignalHandler() as handler:
        with pytest.raises(StoppedBySignal):
            send(signal.SIGTERM)
        with pytest.raises(StoppedBySignal):
            handler.begin_training()


def test_after_the_work_a_signal_ends_nothing(tmp_path: Path) -> None:
    with SignalHandler() as handler:
        assert run_with_signals(lambda _: 0, handler, tmp_path) == 0
        send(signal.SIGTERM)


def test_the_same_request_twice_is_one() -> None:
    with SignalHandler() as handler, mock.patch.object(signals, "DUPLICATE_SIGNAL_SECONDS", 600.0):
        handler.begin_training()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            send(number)
        assert handler.received_signal == "SIGTERM"


def test_a_term_after_hup_is_the_first() -> None:
    """A terminal closes, and the session's end follows; a save may be under way."""
    with SignalHandler() as handler, mock.patch.object(signals, "DUPLICATE_SIGNAL_SECONDS", 0.0):
        handler.begin_training()
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            send(number)
        assert handler.received_signal == "SIGHUP"


def test_usr1_asks_for_one_checkpoint_and_no_stop() -> None:
    with SignalHandler() as handler:
        send(signal.SIGUSR1)  # also before the first step
        handler.begin_training()
        world = SingleProcessWorld()
        assert handler.sync_signal(world) is None
        assert handler.agree(world.sum(handler.signal_flags())) == (None, True)
        assert handler.agree(world.sum(handler.signal_flags())) == (None, False)
        send(signal.SIGUSR1)
        send(signal.SIGTERM)
        assert handler.agree(world.sum(handler.signal_flags())) == ("SIGTERM", True)


SECOND = """
import os, signal, time
from dstrain.training.health.signals import SignalHandler
with SignalHandler() as handler:
    handler.begin_training()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
"""


def test_a_second_term_or_ctrl_c_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], cwd=ROOT, capture_output=True, timeout=30)
    assert done.returncode == -signal.SIGINT
    assert not done.stderr, "no traceback"


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalHandler() as handler:
            handler.begin_training()
            send(signal.SIGHUP)
            assert handler.received_signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


# Whether a stop by a signal would be done in time.


def told(seconds: float | None, step: float, saves: list[float]) -> list[dict[str, Any]]:
    """The events of a run whose steps and saves take so long."""
    events: list[dict[str, Any]] = []
    grace = GracePeriod(seconds, lambda event, **about: events.append({"event": event, **about}), has_terminal=True)
    clock = [0.0, step, 100.0, 100.0 + step, 200.0, 200.0 + 50 * step]
    with mock.patch("time.monotonic", side_effect=clock):
        for _ in range(3):
            grace.begin_step()
            grace.end_step()
    for save in saves:
        grace.record_save(save)
        assert grace.save_seconds == save
    return events


def test_a_save_that_takes_longer_than_is_given_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    (event,) = told(30.0, 2.0, [5.0, 28.5, 29.0])
    assert event["event"] == "warning"
    assert "a checkpoint takes 28.5 s and a step 2.0 s, but SIGKILL follows SIGTERM after 30 s" in event["what"]
    for mend in ("terminationGracePeriodSeconds", "--signal=B:USR1@120", "KillWait", "launch.grace_seconds"):
        assert mend in event["what"]
    assert capsys.readouterr().out == event["what"] + "\n"


def test_what_is_in_time_is_not_warned_of() -> None:
    assert told(30.0, 2.0, [5.0, 27.9]) == []


def test_where_the_grace_is_not_known_nothing_is_said() -> None:
    assert told(None, 100.0, [1000.0]) == []


def test_before_the_first_save_nobody_knows() -> None:
    assert GracePeriod(30.0).save_seconds is None
