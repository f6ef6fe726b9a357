"""Observations: errors are said once, what fails for long is asked rarely, and what returns is read again."""

from __future__ import annotations

import logging

import pytest

from dstrain.report import observe
from dstrain.report.observe import Observation, observing


@pytest.fixture(autouse=True)
def _nothing_reported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_reported", set())


def test_an_error_is_a_warning_once_for_each_subject(caplog: pytest.LogCaptureFixture) -> None:
    for subject in ("a", "a", "b"):
        with observing(subject):
            raise OSError(28, "No space left on device")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.partition(" (")[0] for line in warnings] == ["a failed", "b failed"]


def test_signals_and_exits_pass() -> None:
    with pytest.raises(KeyboardInterrupt), observing("a"):
        raise KeyboardInterrupt


def test_a_value_that_never_comes_is_asked_for_rarely() -> None:
    calls = []

    def fail() -> float:
        calls.append(1)
        raise TimeoutError

    observation = Observation("a")
    assert {observation.read(fail) for _ in range(100_000)} == {None}
    assert len(calls) < 120


def test_a_value_that_returns_is_read_again() -> None:
    values = iter([1.0, None, 3.0, 4.0])

    def read() -> float:
        value = next(values)
        if value is None:
            raise TimeoutError
        return value

    observation = Observation("a")
    assert [observation.read(read) for _ in range(5)] == [1.0, None, None, 3.0, 4.0]
