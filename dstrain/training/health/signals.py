"""Signals, and the grace period of a stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Self

from dstrain.distributed.world import World
from dstrain.errors import EXIT_STOPPED, RunError
from dstrain.launch.worker import DUPLICATE_SIGNAL_SECONDS
from dstrain.process_setup import log_stdout
from dstrain.training.state.manifest import find_latest_complete

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1
"""Asks for a checkpoint after the current step; the run goes on."""
FORCED_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""A second one of these ends the process."""


class StoppedBySignal(BaseException):
    """A signal before the first step. Not an Exception, so that `except Exception` in a library does not catch it."""

    def __init__(self, signal_name: str) -> None:
        self.signal_name = signal_name
        super().__init__(f"{signal_name} before the first step; rerun the same command")


class SignalHandler:
    """Context in which signals ask for a stop, or SAVE_SIGNAL for a checkpoint.

    Before `begin_training` a signal raises StoppedBySignal at once. Later it is recorded, and the loop finishes the
    step and saves. A second SIGTERM or SIGINT ends the process immediately. SAVE_SIGNAL is always recorded. Enter the
    context in the main thread.
    """

    def __init__(self) -> None:
        self.received_signal: str | None = None
        """Signal that this rank got; the loop stops once any rank has one (`Run.should_stop`)."""
        self.agreed_signal: str | None = None
        """Signal that a rank got, known to all ranks."""
        self.is_save_requested = False
        """True if this rank got SAVE_SIGNAL since the ranks last agreed on a save."""
        self.is_done = False
        """True once the work is done: a signal must not end the process before its result is recorded."""
        self._first_signal_time: float | None = None
        self._is_training = False
        self._previous_handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def sync_signal(self, world: World) -> str | None:
        """Return the signal that any rank got, the same on every rank; None if no rank got one. Collective."""
        *stops, _ = self.signal_flags()
        return self.agree([*world.sum(stops), 0.0])[0]

    def signal_flags(self) -> list[float]:
        """Return 1 for each of STOP_SIGNALS that this rank got, and last for SAVE_SIGNAL; else 0."""
        return [float(self.received_signal == number.name) for number in STOP_SIGNALS] + [float(self.is_save_requested)]

    def agree(self, counts: Sequence[float]) -> tuple[str | None, bool]:
        """Return the signal that any rank got, or None, and whether one got SAVE_SIGNAL.

        `counts`: the sum of all ranks' `signal_flags`.
        """
        *stops, saves = counts
        if saves:
            self.is_save_requested = False
        found = next((number.name for number, ranks in zip(STOP_SIGNALS, stops, strict=True) if ranks), None)
        self.agreed_signal = found or self.agreed_signal
        return found, saves > 0

    def begin_training(self) -> None:
        """Record signals from here on, instead of raising. Raises StoppedBySignal if one came before."""
        self._is_training = True
        if self.received_signal is not None:
            raise StoppedBySignal(self.received_signal)

    def __enter__(self) -> Self:
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, SAVE_SIGNAL):
                handler = signal.getsignal(number)
                if number is signal.SIGHUP and handler is signal.SIG_IGN:
                    continue  # started by nohup: the terminal may be closed
                self._previous_handlers[number] = handler
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == SAVE_SIGNAL:
            self.is_save_requested = True
            return
        first, self.received_signal = self.received_signal is None, self.received_signal or signal.Signals(signum).name
        if signum in FORCED_STOP_SIGNALS:
            if (
                self._first_signal_time is not None
                and time.monotonic() - self._first_signal_time > DUPLICATE_SIGNAL_SECONDS
            ):  # a launcher and the shell may both send the first one, a moment apart
                # By the default action, so that the parent sees a process that a signal ended.
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            self._first_signal_time = self._first_signal_time or time.monotonic()
        if first and not self._is_training and not self.is_done:
            raise StoppedBySignal(self.received_signal)


def run_with_signals(function: Callable[[SignalHandler], int], signal_handler: SignalHandler, run_dir: Path) -> int:
    """Return the exit code of `function`, or 75 after a signal before its first step. Call it in the handler's context.

    Raises RunError if there is no checkpoint then: code 75 promises one to the scheduler.
    """
    try:
        code = function(signal_handler)
    except StoppedBySignal as stop:
        signal_handler.is_done = True
        if find_latest_complete(run_dir / "checkpoints") is None:
            raise RunError(f"stopped by {stop}") from None
        code = EXIT_STOPPED
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone; the exit code counts
            log_stdout(f"stopped by {stop}")
    signal_handler.is_done = True
    return code


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
        self.save_seconds: float | None = None
        """Seconds that a stop takes after the end of a step; None before the first save."""
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
        self.save_seconds = seconds
        if self._seconds is None or self._has_warned or seconds + self._median_step_seconds() <= self._seconds:
            return
        self._has_warned = True
        what = (
            f"a stop by a signal would not finish in time: a checkpoint takes {seconds:.1f} s and a step "
            f"{self._median_step_seconds():.1f} s, but SIGKILL follows SIGTERM after {self._seconds:g} s "
            f"(launch.grace_seconds); raise the scheduler's grace period (Kubernetes: "
            f"terminationGracePeriodSeconds; Slurm: KillWait, or --signal=B:USR1@120) and the key, or save faster"
        )
        self._log_event("warning", what=what)
        if self._has_terminal:
            log_stdout(what)

    def _median_step_seconds(self) -> float:
        return median(self._step_seconds) if self._step_seconds else 0.0
