"""Whether a stop by a signal can write its checkpoint before the SIGKILL that follows the signal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

REMEMBERED = 21
"""Steps whose median tells how long one takes."""


class Grace:
    """Compares what a stop takes, the rest of a step and a save, with the time that is given for it."""

    def __init__(
        self, seconds: float | None, tell: Callable[..., None] = lambda *_, **__: None, says: bool = False
    ) -> None:
        """`seconds`: `launch.grace_seconds`. `tell` writes an event. `says`: this rank has the terminal."""
        self._seconds, self._tell, self._says = seconds, tell, says
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._save: float | None = None
        self._began = 0.0
        self._warned = False

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def stepped(self) -> None:
        """It is done."""
        self._steps.append(time.monotonic() - self._began)

    def saved(self, seconds: float) -> None:
        """A checkpoint took so long. Warns once where a stop would take longer than is given."""
        self._save = seconds
        if self._seconds is None or self._warned or seconds + self._step() <= self._seconds:
            return
        self._warned = True
        what = (
            f"a stop by a signal would not be done in time: a checkpoint takes {seconds:.1f} s and a step "
            f"{self._step():.1f} s, and {self._seconds:g} s after SIGTERM comes SIGKILL (launch.grace_seconds); raise the "
            f"scheduler's grace (Kubernetes: terminationGracePeriodSeconds; Slurm: KillWait, or --signal=USR1@120) and the "
            f"key with it, or save faster"
        )
        self._tell("warning", what=what)
        if self._says:
            print(what, flush=True)

    def expected(self) -> float | None:
        """Seconds that a stop takes from the end of a step on; None before the first save."""
        return self._save

    def _step(self) -> float:
        return median(self._steps) if self._steps else 0.0
