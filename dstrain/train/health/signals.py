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

from dstrain.errors import RunError
from dstrain.launch.exit_code import STOPPED
from dstrain.launch.worker import SAME_SECONDS
from dstrain.train.state.manifest import newest_whole

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
"""Of these a second one ends the process. USR1 and HUP are often sent ahead of a SIGTERM, which is the first then."""


class Interrupted(BaseException):
    """A signal came before the first step. Not an Exception: what runs then must not take it for an error of its own."""

    def __init__(self, signal: str) -> None:
        self.signal = signal
        super().__init__(f"{signal} before the first step; rerun the same command")


class Interrupt:
    """Within `with`, signals ask for an end. Before the first step it comes at once, as Interrupted; after `begin` the
    signal is noted, so that the step is finished and saved. A second SIGTERM or SIGINT ends the process then and there.

    Enter it in the main thread; within itself that does nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal this rank got; the loop stops once any rank has one (`Run.stops`)."""
        self.agreed: str | None = None
        """Name of the signal that one of the ranks got, known to all."""
        self.over = False
        """Whether the work is done: signals mean nothing then, but end nothing either until it is recorded."""
        self._told_at: float | None = None
        self._depth = 0
        self._began = False
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def begin(self) -> None:
        """The first step is about to come: from here on signals are noted. Raises Interrupted where one came before."""
        self._began = True
        if self.received is not None:
            raise Interrupted(self.received)

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if number is signal.SIGHUP and handler is signal.SIG_IGN:
                    continue  # nohup: the terminal may go
                self._before[number] = handler
                signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = self.received is None, self.received or signal.Signals(number).name
        if number in AT_ONCE:
            if self._told_at is not None and time.monotonic() - self._told_at > SAME_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._told_at = self._told_at or time.monotonic()
        if first and not self._began and not self.over:
            raise Interrupted(self.received)


def stoppable(work: Callable[[Interrupt], int], interrupt: Interrupt, run_dir: Path) -> int:
    """The exit code of `work`; 75 and a line where a signal came before its first step, and a checkpoint is there.

    Raises RunError where none is: 75 promises one.
    """
    with interrupt:
        try:
            code = work(interrupt)
        except Interrupted as stop:
            interrupt.over = True
            if newest_whole(run_dir / "checkpoints") is None:
                raise RunError(f"stopped by {stop}") from None
            code = STOPPED
            with contextlib.suppress(OSError, ValueError):
                print(f"stopped by {stop}", flush=True)
        interrupt.over = True
        return code
