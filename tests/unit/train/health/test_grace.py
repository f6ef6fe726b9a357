"""Whether a stop by a signal would be done in time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from dstrain.train.health.signals import GracePeriod


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
        assert grace.expected_stop_seconds() == save
    return events


def test_a_save_that_takes_longer_than_is_given_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    (event,) = told(30.0, 2.0, [5.0, 28.5, 29.0])
    assert event["event"] == "warning"
    assert "a checkpoint takes 28.5 s and a step 2.0 s, but SIGKILL follows SIGTERM after 30 s" in event["what"]
    for mend in ("terminationGracePeriodSeconds", "--signal=USR1@120", "KillWait", "launch.grace_seconds"):
        assert mend in event["what"]
    assert capsys.readouterr().out == event["what"] + "\n"


def test_what_is_in_time_is_not_warned_of() -> None:
    assert told(30.0, 2.0, [5.0, 27.9]) == []


def test_where_the_grace_is_not_known_nothing_is_said() -> None:
    assert told(None, 100.0, [1000.0]) == []


def test_before_the_first_save_nobody_knows() -> None:
    assert GracePeriod(30.0).expected_stop_seconds() is None
