"""Messages between the launching process and an agent: a JSON object per line, and beats that say one is alive.

Each message begins with a line break and the nonce of its session: what a login script prints on the same stream, with
or without a line break, JSON or not, is no message and no sign of life.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

BEATS = 6
"""Beats in the time after which a silent peer is given up."""
_PART, _PARTS = 1 << 16, 64
"""Bytes that are read at a time, and how often at most before the caller has its turn again."""
_NOISE = b"?"
"""In place of the beginning of a line that is no message, which may be long."""


class Line:
    """One end. Neither side ever waits in it."""

    def __init__(self, read: int, write: int, silence: float, nonce: str) -> None:
        self.read, self._write = read, write
        self.silence = self.patience = silence
        """Seconds: the peer gives us up after the first, we give it up after the second."""
        self.closed = False
        self.noise = False
        """Whether something else than messages came."""
        self._prefix = nonce.encode() + b" "
        self._in, self._out = b"", b""
        self._heard = self._sent = time.monotonic()
        os.set_blocking(read, False)
        os.set_blocking(write, False)

    def send(self, **message: Any) -> None:
        """Queue a message and write what can be written."""
        self._out += b"\n" + self._prefix + json.dumps(message).encode() + b"\n"
        self._sent = time.monotonic()
        self._flush()

    def beat(self) -> None:
        """Say that we are there, where it is time to."""
        if time.monotonic() - self._sent > self.silence / BEATS:
            self.send()
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """What came since, but for beats."""
        messages: list[dict[str, Any]] = []
        for _ in range(_PARTS):
            try:
                part = os.read(self.read, _PART)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.closed = True
                break
            messages += self._messages(part)
        return messages

    def _messages(self, part: bytes) -> list[dict[str, Any]]:
        """The messages that this part of the stream completes."""
        *lines, rest = (self._in + part).split(b"\n")
        found = []
        for line in lines:
            if not line.startswith(self._prefix):
                self.noise = self.noise or bool(line)
                continue
            with contextlib.suppress(ValueError):
                message = json.loads(line[len(self._prefix) :])
                self._heard = time.monotonic()
                if isinstance(message, dict) and message:
                    found.append(message)
        if rest.startswith(self._prefix):  # a long message on its way
            self._heard = time.monotonic()
        elif not self._prefix.startswith(rest):
            self.noise, rest = True, _NOISE
        self._in = rest
        return found

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
