"""Heartbeat socket between an agent and its ranks; it also sends the environment."""

# A unix socket with an abstract name (unix(7)): it has no file, so nothing is left on a disk
# however the agent ends, and it does not depend on the hosts' shared file system. Both ends check
# the other's user (SO_PEERCRED). Every connection receives a line break per heartbeat; one that
# sends the token, which is in the launch file, also receives the environment as a line of JSON. The
# socket's name is readable by every user of the host, also from containers that share its network,
# where root has the same uid; the token is not. Only durations of one host's monotonic clock are
# compared.

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

HEARTBEAT_ENV = "DSTRAIN_HEARTBEAT"
"""`NAME SECONDS`: the agent's socket, and launch.heartbeat_timeout_seconds. Set for ranks that an
agent watches."""
RANK_TIMEOUT_FACTOR = 3
"""A rank ends itself after this many times launch.heartbeat_timeout_seconds without a heartbeat;
the launch has dropped its agent by then."""
ENVIRONMENT_TIMEOUT_SECONDS = 60.0
"""Limit for an agent to send the environment: it may wait for a file system."""
_BEATS_PER_TIMEOUT, _POLLS_PER_TIMEOUT = 6, 2
"""Heartbeats sent, and polls for one, per launch.heartbeat_timeout_seconds."""
_LOG_TIMEOUT_SECONDS = 2.0
"""Limit for writing an error line: the log may be on a file system that hangs."""
_MAX_PENDING_BYTES = 1 << 12
"""Unsent heartbeats are limited to this many bytes per rank: it may be suspended."""
_MAX_ACCEPTS = 64
"""Connections accepted per call: another user may open any number of them."""


class HeartbeatServer:
    """Agent's end of the socket. Non-blocking."""

    def __init__(self, heartbeat_timeout: float) -> None:
        self.socket_name = f"dstrain-{secrets.token_hex(16)}"
        self.token = secrets.token_hex(16)
        self._interval = heartbeat_timeout / _BEATS_PER_TIMEOUT
        self._next_beat_at = time.monotonic()
        self._environment: bytes | None = None
        self._pending_bytes: dict[socket.socket, bytes] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(f"\0{self.socket_name}")
        self._server.listen(128)
        # The agent's loop also reads its channel: it must not wait here.
        self._server.setblocking(False)

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """Set the environment; from this call on ranks receive heartbeats and answers."""
        self._environment = json.dumps(dict(environment)).encode() + b"\n"

    def send_heartbeats(self) -> None:
        """Answer connected ranks, and send a heartbeat when it is due. Call it often."""
        if self._environment is None:
            return
        with contextlib.suppress(OSError):  # no connection waits, or no file descriptor is free
            for _ in range(_MAX_ACCEPTS):
                self._add_connection(self._server.accept()[0])
        due = time.monotonic() >= self._next_beat_at
        if due:
            self._next_beat_at = time.monotonic() + self._interval
        for rank, unsent in [*self._pending_bytes.items()]:
            if due and len(unsent) < _MAX_PENDING_BYTES:
                unsent += b"\n"
            try:
                unsent += self._read_reply(rank)
                self._pending_bytes[rank] = unsent[rank.send(unsent) :] if unsent else b""
            except BlockingIOError:
                self._pending_bytes[rank] = unsent
            except OSError:  # it has ended
                del self._pending_bytes[rank]
                rank.close()

    def _read_reply(self, connection: socket.socket) -> bytes:
        """Return the environment if the rank has just sent the token, else nothing."""
        with contextlib.suppress(BlockingIOError):
            # Takes equally long for any wrong token.
            if hmac.compare_digest(connection.recv(256).strip(), self.token.encode()):
                return self._environment or b""
        return b""

    def _add_connection(self, connection: socket.socket) -> None:
        if _get_peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        self._pending_bytes[connection] = b"\n"


def fetch_environment(socket_name: str, token: str, timeout: float = ENVIRONMENT_TIMEOUT_SECONDS) -> dict[str, str]:
    """Return the launch environment from this host's agent.

    Raises OSError if this user's agent does not answer in time.
    """
    until = time.monotonic() + timeout
    with _connect(socket_name, timeout) as agent:
        agent.sendall(token.encode())
        received = b""
        while b"\n" not in received:
            agent.settimeout(max(0.01, until - time.monotonic()))
            part = agent.recv(1 << 16)
            if not part:
                raise ConnectionResetError("it closed the connection")
            # Without the heartbeats that came before.
            received = (received + part).lstrip(b"\n")
    found: dict[str, Any] = json.loads(received.partition(b"\n")[0])
    return {str(key): str(value) for key, value in found.items()}


def watch_heartbeat() -> None:
    """Start a thread that kills this process when its agent has ended, is suspended, or hangs."""
    name, _, timeout = os.environ.get(HEARTBEAT_ENV, "").partition(" ")
    if name:
        threading.Thread(target=_watch, args=(name, float(timeout)), name="follow-heartbeat", daemon=True).start()


def _watch(socket_name: str, heartbeat_timeout: float) -> None:
    """Wait for heartbeats; kill this process without them.

    The timeout is split into several polls, so that after a pause of the whole machine the agent
    can send one first.
    """
    missed, silent = 0, False
    try:
        with _connect(socket_name, heartbeat_timeout) as agent:
            agent.setblocking(False)
            poll = select.poll()
            poll.register(agent, select.POLLIN)
            while not silent and (missed := missed + 1):
                if not poll.poll(1000 * heartbeat_timeout / _POLLS_PER_TIMEOUT):
                    silent = missed == RANK_TIMEOUT_FACTOR * _POLLS_PER_TIMEOUT
                elif agent.recv(1 << 16):
                    missed = 0
                else:  # it has ended
                    break
    except OSError:
        # The agent has ended, or cannot be reached. No message: the launch reports that host, and this process ends
        # below, as it does where the agent closes the connection.
        silent = False
    if silent:
        print_error(
            f"error: the agent of this host has sent no heartbeat for "
            f"{RANK_TIMEOUT_FACTOR * heartbeat_timeout:g} s: it is stopped, or it hangs. "
            "This rank is no longer supervised, so it ends itself; start the same command again to resume"
        )
    os.kill(os.getpid(), signal.SIGKILL)


def print_error(text: str) -> None:
    """Write a line to stderr; give up after 2 s if its reader does not read."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_LOG_TIMEOUT_SECONDS)


def _connect(socket_name: str, timeout: float) -> socket.socket:
    """Return a connection to an agent of this user. Raises OSError."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    until = time.monotonic() + timeout
    try:
        agent.settimeout(timeout)
        while True:
            try:
                agent.connect(f"\0{socket_name}")
                break
            except BlockingIOError:  # the backlog is full
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        # Any user can bind an abstract name.
        if _get_peer_uid(agent) != os.geteuid():
            raise PermissionError("it belongs to another user")
    except OSError:
        agent.close()
        raise
    return agent


def _get_peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel reports it."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
