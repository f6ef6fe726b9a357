"""Whether a stop by a signal can write its checkpoint before the SIGKILL that follows the signal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

STEP_TIME_WINDOW = 21
"""Steps whose median tells how long one takes."""


class GracePeriod:
    """Compares what a stop takes, the rest of a step and a save, with the time that is given for it."""

    def __init__(
        self, seconds: float | None, log_event: Callable[..., None] = lambda *_, **__: None, has_terminal: bool = False
    ) -> None:
        """`seconds`: `launch.grace_seconds`. `tell` writes an event. `says`: this rank has the terminal."""
        self._seconds, self._log_event, self._has_terminal = seconds, log_event, has_terminal
        self._step_seconds: deque[float] = deque(maxlen=STEP_TIME_WINDOW)
        self._save_seconds: float | None = None
        self._step_start = 0.0
        self._has_warned = False

    def begin_step(self) -> None:
        """A step begins."""
        self._step_start = time.monotonic()

    def end_step(self) -> None:
        """It is done."""
        self._step_seconds.append(time.monotonic() - self._step_start)

    def record_save(self, seconds: float) -> None:
        """A checkpoint took so long. Warns once where a stop would take longer than is given."""
        self._save_seconds = seconds
        if self._seconds is None or self._has_warned or seconds + self._median_step_seconds() <= self._seconds:
            return
        self._has_warned = True
        what = (
            f"a stop by a signal would not be done in time: a checkpoint takes {seconds:.1f} s and a step "
            f"{self._median_step_seconds():.1f} s, and {self._seconds:g} s after SIGTERM comes SIGKILL (launch.grace_seconds); raise the "
            f"scheduler's grace (Kubernetes: terminationGracePeriodSeconds; Slurm: KillWait, or --signal=USR1@120) and the "
            f"key with it, or save faster"
        )
        self._log_event("warning", what=what)
        if self._has_terminal:
            print(what, flush=True)

    def expected_stop_seconds(self) -> float | None:
        """Seconds that a stop takes from the end of a step on; None before the first save."""
        return self._save_seconds

    def _median_step_seconds(self) -> float:
        return median(self._step_seconds) if self._step_seconds else 0.0
