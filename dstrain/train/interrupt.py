"""Signals that ask a run to stop: it finishes the step, saves, and exits with 75."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Interrupt:
    """Within `with`, a first signal is noted, so that the step is finished; a second one ends at once."""

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal this rank got; the loop stops once any rank has one (`Run.stops`)."""

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number != signal.SIGUSR1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = self.received or signal.Signals(number).name
