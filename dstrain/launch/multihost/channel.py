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

BEATS_PER_TIMEOUT = 6
"""Beats in the time after which a silent peer is given up."""
_READ_BYTES, _MAX_READS = 1 << 16, 64
"""Bytes that are read at a time, and how often at most before the caller has its turn again."""
_NOISE_MARKER = b"?"
"""In place of the beginning of a line that is no message, which may be long."""


class Channel:
    """One end. Neither side ever waits in it."""

    def __init__(self, read_fd: int, write_fd: int, heartbeat_timeout: float, nonce: str) -> None:
        self.read_fd, self._write_fd = read_fd, write_fd
        self.heartbeat_timeout = self.peer_timeout = heartbeat_timeout
        """Seconds: the peer gives us up after the first, we give it up after the second."""
        self.closed = False
        self.has_noise = False
        """Whether something else than messages came."""
        self._prefix = nonce.encode() + b" "
        self._read_buffer, self._write_buffer = b"", b""
        self._last_received_at = self._last_sent_at = time.monotonic()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, **message: Any) -> None:
        """Queue a message and write what can be written."""
        self._write_buffer += b"\n" + self._prefix + json.dumps(message).encode() + b"\n"
        self._last_sent_at = time.monotonic()
        self._flush()

    def send_heartbeat(self) -> None:
        """Say that we are there, where it is time to."""
        if time.monotonic() - self._last_sent_at > self.heartbeat_timeout / BEATS_PER_TIMEOUT:
            self.send()
        self._flush()

    def read_messages(self) -> list[dict[str, Any]]:
        """What came since, but for beats."""
        messages: list[dict[str, Any]] = []
        for _ in range(_MAX_READS):
            try:
                part = os.read(self.read_fd, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.closed = True
                break
            messages += self._parse_messages(part)
        return messages

    def _parse_messages(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that this part of the stream completes."""
        *lines, rest = (self._read_buffer + data).split(b"\n")
        found = []
        for line in lines:
            if not line.startswith(self._prefix):
                self.has_noise = self.has_noise or bool(line)
                continue
            with contextlib.suppress(ValueError):
                message = json.loads(line[len(self._prefix) :])
                self._last_received_at = time.monotonic()
                if isinstance(message, dict) and message:
                    found.append(message)
        if rest.startswith(self._prefix):  # a long message on its way
            self._last_received_at = time.monotonic()
        elif not self._prefix.startswith(rest):
            self.has_noise, rest = True, _NOISE_MARKER
        self._read_buffer = rest
        return found

    def is_timed_out(self) -> bool:
        """Whether nothing was heard for too long."""
        return time.monotonic() - self._last_received_at > self.peer_timeout

    def _flush(self) -> None:
        while self._write_buffer:
            try:
                self._write_buffer = self._write_buffer[os.write(self._write_fd, self._write_buffer) :]
            except BlockingIOError:
                return
            except OSError:
                self.closed, self._write_buffer = True, b""
