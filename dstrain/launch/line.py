"""Messages between the launching process and an agent: a JSON object per line, and beats that say one is alive."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

BEATS = 6
"""Beats in the time after which a silent peer is given up."""


class Line:
    """One end. Neither side ever waits in it."""

    def __init__(self, read: int, write: int, silence: float) -> None:
        self.read, self._write = read, write
        self._silence = self.patience = silence
        """Seconds: the peer gives us up after the first, we give it up after the second."""
        self.closed = False
        self._in, self._out = b"", b""
        self._heard = self._sent = time.monotonic()
        os.set_blocking(read, False)
        os.set_blocking(write, False)

    def send(self, **message: Any) -> None:
        """Queue a message and write what can be written."""
        self._out += json.dumps(message).encode() + b"\n"
        self._sent = time.monotonic()
        self._flush()

    def beat(self) -> None:
        """Say that we are there, where it is time to."""
        if time.monotonic() - self._sent > self._silence / BEATS:
            self.send()
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """What came since, but for beats."""
        while True:
            try:
                part = os.read(self.read, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.closed = True
                break
            self._heard = time.monotonic()
            self._in += part
        *lines, self._in = self._in.split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a login script that prints
                message = json.loads(line)
                if isinstance(message, dict) and message:
                    messages.append(message)
        return messages

    def silent(self) -> bool:
        """Whether nothing was heard for too long."""
        return time.monotonic() - self._heard > self.patience

    def _flush(self) -> None:
        while self._out:
            try:
                self._out = self._out[os.write(self._write, self._out) :]
            except BlockingIOError:
                return
            except OSError:
                self.closed, self._out = True, b""
