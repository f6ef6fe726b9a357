"""Check that a checkpoint can be written between SIGTERM and SIGKILL."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from dstrain.process_setup import log_stdout

STEP_TIME_WINDOW = 21
"""Number of recent steps whose median is the expected time of a step."""


class GracePeriod:
    """Comparison of the time a stop takes (the rest of a step and a save) with the grace period."""

    def __init__(
        self, seconds: float | None, log_event: Callable[..., None] = lambda *_, **__: None, has_terminal: bool = False
    ) -> None:
        """`seconds` is `launch.grace_seconds`, None to check nothing; `has_terminal` is true on rank 0."""
        self._seconds, self._log_event, self._has_terminal = seconds, log_event, has_terminal
        self._step_seconds: deque[float] = deque(maxlen=STEP_TIME_WINDOW)
        self._save_seconds: float | None = None
        self._step_start = 0.0
        self._has_warned = False

    def begin_step(self) -> None:
        """Start the clock of a step."""
        self._step_start = time.monotonic()

    def end_step(self) -> None:
        """Record the duration of the step."""
        self._step_seconds.append(time.monotonic() - self._step_start)

    def record_save(self, seconds: float) -> None:
        """Record the duration of a save in seconds; warn once if a stop would exceed the grace period."""
        self._save_seconds = seconds
        if self._seconds is None or self._has_warned or seconds + self._median_step_seconds() <= self._seconds:
            return
        self._has_warned = True
        what = (
            f"a stop by a signal would not finish in time: a checkpoint takes {seconds:.1f} s and a step "
            f"{self._median_step_seconds():.1f} s, but SIGKILL follows SIGTERM after {self._seconds:g} s "
            f"(launch.grace_seconds); raise the scheduler's grace period (Kubernetes: "
            f"terminationGracePeriodSeconds; Slurm: KillWait, or --signal=USR1@120) and the key, or save faster"
        )
        self._log_event("warning", what=what)
        if self._has_terminal:
            log_stdout(what)

    def expected_stop_seconds(self) -> float | None:
        """Return the seconds a stop takes after the end of a step; None before the first save."""
        return self._save_seconds

    def _median_step_seconds(self) -> float:
        return median(self._step_seconds) if self._step_seconds else 0.0
