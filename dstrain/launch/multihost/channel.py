"""JSON-lines channel between the launching process and an agent, with heartbeats."""

# Each message starts with a line break and the nonce of its session, so that output of a login
# script on the same stream, with or without a line break, JSON or not, is neither a message nor a
# heartbeat.

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

BEATS_PER_TIMEOUT = 6
"""Heartbeats sent per timeout."""
_READ_BYTES, _MAX_READS = 1 << 16, 64
"""Bytes per read, and reads per call of `read_messages`."""
_NOISE_MARKER = b"?"
"""Replaces the beginning of a line that is not a message: such a line may be long."""


class Channel:
    """End of a JSON-lines channel over two pipes.

    Non-blocking: `send` queues, `read_messages` returns what has arrived. Another thread may send than the one that reads.
    """

    def __init__(self, read_fd: int, write_fd: int, heartbeat_timeout: float, nonce: str) -> None:
        self.read_fd, self._write_fd = read_fd, write_fd
        self.heartbeat_timeout = heartbeat_timeout
        """Seconds without a message after which each end drops the other."""
        self.closed = False
        self.has_noise = False
        """True if other output than messages arrived."""
        self.has_messages = False
        """True if a message or a heartbeat arrived."""
        self._prefix = nonce.encode() + b" "
        self._read_buffer, self._write_buffer = b"", b""
        self._write_lock = threading.Lock()
        self._last_received_at = self._last_sent_at = time.monotonic()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, **message: Any) -> None:
        """Queue a message, and write as much as the pipe takes."""
        with self._write_lock:
            self._write_buffer += b"\n" + self._prefix + json.dumps(message).encode() + b"\n"
            self._last_sent_at = time.monotonic()
            self._flush()

    def send_heartbeat(self) -> None:
        """Send an empty message if the last one is too old, and what the pipe did not take before."""
        if time.monotonic() - self._last_sent_at > self.heartbeat_timeout / BEATS_PER_TIMEOUT:
            self.send()
        with self._write_lock:
            self._flush()

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, without heartbeats."""
        messages: list[dict[str, Any]] = []
        # Limited, so that a peer that writes without end does not keep the caller here.
        for _ in range(_MAX_READS):
            try:
                data = os.read(self.read_fd, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            messages += self._parse_messages(data)
        return messages

    def _parse_messages(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that this part of the stream completes."""
        *lines, rest = (self._read_buffer + data).split(b"\n")
        messages = []
        for line in lines:
            if not line.startswith(self._prefix):
                self.has_noise = self.has_noise or bool(line)
                continue
            with contextlib.suppress(ValueError):  # cut off by a session that ended
                message = json.loads(line[len(self._prefix) :])
                self._last_received_at, self.has_messages = time.monotonic(), True
                if isinstance(message, dict) and message:
                    messages.append(message)
        if rest.startswith(self._prefix):  # the beginning of a long message
            self._last_received_at = time.monotonic()
        elif not self._prefix.startswith(rest):
            self.has_noise, rest = True, _NOISE_MARKER
        self._read_buffer = rest
        return messages

    def is_timed_out(self) -> bool:
        """Return True if the last message is older than the timeout."""
        return time.monotonic() - self._last_received_at > self.heartbeat_timeout

    def _flush(self) -> None:
        while self._write_buffer:
            try:
                self._write_buffer = self._write_buffer[os.write(self._write_fd, self._write_buffer) :]
            except BlockingIOError:
                return
            except OSError:
                self.closed, self._write_buffer = True, b""
