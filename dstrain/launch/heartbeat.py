"""Heartbeats from an agent to the ranks of its host, and the environment of the launch, which may hold secrets.

Both go over a unix socket with an abstract name (unix(7)): no file stands for it, so that nothing is left of it on any
disk however the agent ends, and nothing of it depends on the file system that the hosts share. Each end asks the kernel
for the user of the other (SO_PEERCRED) and talks to its own alone. Whoever connects gets a line break per beat; who sends the
token, which stands in the launch file, a line of JSON too: the environment. The name can be read by everyone on the host, in
containers that share its network as well, where root is no other user; the token cannot. Only time spans of one host's
monotonic clock are compared.
"""

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
"""`NAME SECONDS`: the agent's socket, and launch.heartbeat_timeout_seconds. For ranks that an agent watches."""
RANK_TIMEOUT_FACTOR = 3
"""A rank ends itself when nothing came for so many times launch.heartbeat_timeout_seconds: by then the launch has given its agent up."""
ENVIRONMENT_TIMEOUT_SECONDS = 60.0
"""For an agent to hand out the environment: it may wait for a file system."""
_BEATS_PER_TIMEOUT, _POLLS_PER_TIMEOUT = 6, 2
"""Beats, and looks for one, in launch.heartbeat_timeout_seconds."""
_LOG_TIMEOUT_SECONDS = 2.0
"""For a sentence: the log may lie on the file system that hangs."""
_MAX_PENDING_BYTES = 1 << 12
"""Bytes that may wait for a rank that is stopped."""
_MAX_ACCEPTS = 64
"""Connections that are taken at a time: another user may open as many as he likes."""


class HeartbeatServer:
    """The agent's end. It never waits."""

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
        self._server.setblocking(False)

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """From now on ranks are answered."""
        self._environment = json.dumps(dict(environment)).encode() + b"\n"

    def send_heartbeats(self) -> None:
        """Answer the ranks that have connected, and beat where it is time to. Call it often."""
        if self._environment is None:
            return
        with contextlib.suppress(OSError):  # nobody, or out of descriptors
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
        """The environment, where the rank has just sent the token."""
        with contextlib.suppress(BlockingIOError):
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
    """The environment of the launch, from the agent of this host. Raises OSError where none of ours answers in time."""
    until = time.monotonic() + timeout
    with _connect(socket_name, timeout) as agent:
        agent.sendall(token.encode())
        received = b""
        while b"\n" not in received:
            agent.settimeout(max(0.01, until - time.monotonic()))
            part = agent.recv(1 << 16)
            if not part:
                raise ConnectionResetError("it ended while it was asked")
            received = (received + part).lstrip(b"\n")
    found: dict[str, Any] = json.loads(received.partition(b"\n")[0])
    return {str(key): str(value) for key, value in found.items()}


def watch_heartbeat() -> None:
    """End this process where its agent no longer beats: stopped, or hung, as well as ended. In a thread."""
    name, _, silence = os.environ.get(HEARTBEAT_ENV, "").partition(" ")
    if name:
        threading.Thread(target=_watch, args=(name, float(silence)), name="follow-heartbeat", daemon=True).start()


def _watch(socket_name: str, heartbeat_timeout: float) -> None:
    """Until it is over. Time counts in several looks: after a pause of the whole machine the agent has its turn too."""
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
    except OSError:  # the agent has ended, or cannot be reached: this process ends below, as after silence
        pass
    if silent:
        print_error(
            f"error: the agent of this host has sent no heartbeat for {RANK_TIMEOUT_FACTOR * heartbeat_timeout:g} s: it is stopped, or it hangs. "
            "Nothing watches over this rank any more, so it ends itself; start the same command again to go on"
        )
    os.kill(os.getpid(), signal.SIGKILL)


def print_error(text: str) -> None:
    """Write a line to the error output; give up, within 2 s, where that cannot be written now: a reader has stopped."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_LOG_TIMEOUT_SECONDS)


def _connect(socket_name: str, timeout: float) -> socket.socket:
    """The socket of an agent of this user. Raises OSError."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    until = time.monotonic() + timeout
    try:
        agent.settimeout(timeout)
        while True:
            try:
                agent.connect(f"\0{socket_name}")
                break
            except BlockingIOError:  # too many wait already
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        if _get_peer_uid(agent) != os.geteuid():
            raise PermissionError("it belongs to another user")
    except OSError:
        agent.close()
        raise
    return agent


def _get_peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
