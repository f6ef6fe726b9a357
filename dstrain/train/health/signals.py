"""Signals that ask a run to stop: it finishes the step, saves, and exits with 75."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from dstrain.errors import EXIT_STOPPED, RunError
from dstrain.launch.worker import DUPLICATE_SIGNAL_SECONDS
from dstrain.train.state.manifest import find_latest_complete

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
FORCED_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Of these a second one ends the process. USR1 and HUP are often sent ahead of a SIGTERM, which is the first then."""


class StoppedBySignal(BaseException):
    """A signal came before the first step. Not an Exception: what runs then must not take it for an error of its own."""

    def __init__(self, signal_name: str) -> None:
        self.signal_name = signal_name
        super().__init__(f"{signal_name} before the first step; rerun the same command")


class SignalHandler:
    """Within `with`, signals ask for an end. Before the first step it comes at once, as Interrupted; after `begin` the
    signal is noted, so that the step is finished and saved. A second SIGTERM or SIGINT ends the process then and there.

    Enter it in the main thread; within itself that does nothing.
    """

    def __init__(self) -> None:
        self.received_signal: str | None = None
        """Name of the signal this rank got; the loop stops once any rank has one (`Run.stops`)."""
        self.agreed_signal: str | None = None
        """Name of the signal that one of the ranks got, known to all."""
        self.is_done = False
        """Whether the work is done: signals mean nothing then, but end nothing either until it is recorded."""
        self._first_signal_time: float | None = None
        self._depth = 0
        self._is_training = False
        self._previous_handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def begin_training(self) -> None:
        """The first step is about to come: from here on signals are noted. Raises Interrupted where one came before."""
        self._is_training = True
        if self.received_signal is not None:
            raise StoppedBySignal(self.received_signal)

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                handler = signal.getsignal(number)
                if number is signal.SIGHUP and handler is signal.SIG_IGN:
                    continue  # nohup: the terminal may go
                self._previous_handlers[number] = handler
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._previous_handlers = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first, self.received_signal = self.received_signal is None, self.received_signal or signal.Signals(signum).name
        if signum in FORCED_STOP_SIGNALS:
            if (
                self._first_signal_time is not None
                and time.monotonic() - self._first_signal_time > DUPLICATE_SIGNAL_SECONDS
            ):
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            self._first_signal_time = self._first_signal_time or time.monotonic()
        if first and not self._is_training and not self.is_done:
            raise StoppedBySignal(self.received_signal)


def run_with_signals(function: Callable[[SignalHandler], int], signal_handler: SignalHandler, run_dir: Path) -> int:
    """The exit code of `work`; 75 and a line where a signal came before its first step, and a checkpoint is there.

    Raises RunError where none is: 75 promises one.
    """
    with signal_handler:
        try:
            code = function(signal_handler)
        except StoppedBySignal as stop:
            signal_handler.is_done = True
            if find_latest_complete(run_dir / "checkpoints") is None:
                raise RunError(f"stopped by {stop}") from None
            code = EXIT_STOPPED
            with contextlib.suppress(OSError, ValueError):
                print(f"stopped by {stop}", flush=True)
        signal_handler.is_done = True
        return code
