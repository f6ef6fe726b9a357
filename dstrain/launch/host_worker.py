"""Ranks of a launch on a host that is reached over ssh: `python -m dstrain.launch.host_worker`."""

# Standard input and output carry messages from and to the launching process (launch/hosts.py). The environment comes this
# way, so that it is on no command line and in no file.
#
#     {"call": "dstrain.launch.probe:try_connect", "arguments": {...}}   answered by {"reply": ...}
#     {"start": {...}}    the ranks of this host; answered by {"ended": [rank, RankEnd]} for each rank when it ends, and by
#                         {"remaining": [pids that could not be ended]} at the end, and meanwhile by
#                         {"stopped": [ranks]} when other ranks than before are stopped (SIGSTOP)
#     {"signal": 15}      for the ranks
#
# The ranks are children of this process, under the same supervision as on one host. The end of standard input ends them,
# so nothing outlives the launching process; so does launch.heartbeat_timeout_seconds without a line, for a network that
# is lost or a launching process that is suspended. The reason is then sent as {"aborted": reason}. Reports of ranks carry
# their records: the launching host may see files that another host wrote only later.

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dstrain.errors import EXIT_FAILED
from dstrain.files import parse_json
from dstrain.launch.plan import Launch, host_environment
from dstrain.launch.spawn import LocalWorkerGroup, wait_readable
from dstrain.launch.supervise import supervise
from dstrain.process_setup import raise_open_files_limit

MESSAGE_MARK = b"dstrain-message "
"""Beginning of a message: login scripts print on the same stream, with or without line breaks, JSON or not."""
IDLE_SECONDS = 600.0
"""Longest time without a message before the ranks start."""
_READ_BYTES = 1 << 16
_WRITE_TIMEOUT_SECONDS = 10.0


class MessagePipe:
    """JSON messages, one a line, over two descriptors; other lines are ignored."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self._write_fd = read_fd, write_fd
        self.received: deque[dict[str, Any]] = deque()
        """Messages that `receive` has read and nobody has taken yet."""
        self.closed = False
        """True if the other end has closed the stream, and all of it has been read."""
        self.last_read_at = time.monotonic()
        self._incomplete_line = b""
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, **message: Any) -> None:
        """Write a message. One that the other end does not take is dropped: reading tells that it has ended."""
        self._write(b"\n" + MESSAGE_MARK + json.dumps(message).encode() + b"\n")

    def send_blank(self) -> None:
        """Write a blank line, which says that this process runs."""
        self._write(b"\n")

    def _write(self, data: bytes) -> None:
        writable = select.poll()
        writable.register(self._write_fd, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            while data and writable.poll(1000 * _WRITE_TIMEOUT_SECONDS):
                with contextlib.suppress(BlockingIOError):  # a process of a login script has written meanwhile
                    data = data[os.write(self._write_fd, data) :]

    def receive(self) -> None:
        """Read what has arrived, at most 64 KiB: the other end may write without end."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return
        self.last_read_at = time.monotonic()
        *lines, rest = (self._incomplete_line + data).split(b"\n")
        for line in lines:
            if line.startswith(MESSAGE_MARK):
                with contextlib.suppress(ValueError):  # cut off by a session that ended
                    self.received.append(parse_json(line[len(MESSAGE_MARK) :]))
        # Only a message is kept from its beginning: output without a line break may be long.
        self._incomplete_line = rest if rest.startswith(MESSAGE_MARK) else rest[-len(MESSAGE_MARK) :]


class HostWorkerGroup(LocalWorkerGroup):
    """Ranks of this host, of which the launching process on another host is told."""

    def __init__(
        self, launch: Launch, run_dir: Path, messages: MessagePipe, listener: socket.socket | None, output: Any
    ) -> None:
        super().__init__(launch, run_dir, listener, output)
        self._messages = messages
        self._reported: set[int] = set()
        self._reported_stopped: set[int] = set()

    def poll(self) -> None:
        super().poll()
        self._messages.receive()
        while self._messages.received:
            message = self._messages.received.popleft()
            if "signal" in message:
                self.send_signal(message["signal"])
        limit = self.launch.heartbeat_timeout
        if self._messages.closed:
            self.abort_reason = "the launching process has ended"
        elif time.monotonic() - self._messages.last_read_at > limit:
            causes = "it was suspended (SIGSTOP, Ctrl-Z, a machine that slept), or the network was interrupted"
            self.abort_reason = f"heard nothing from the launching process for {limit:g} s: {causes}"
        self._report_ends()
        stopped = self.find_stopped_ranks()
        if stopped != self._reported_stopped:
            self._reported_stopped = stopped
            self._messages.send(stopped=sorted(stopped))

    def _report_ends(self) -> None:
        for rank, end in self.ends.items():  # in this order: the first one is to blame
            if rank not in self._reported:
                self._reported.add(rank)
                self._messages.send(ended=[rank, asdict(end)])

    def kill(self) -> list[str]:
        if self.abort_reason:
            self._messages.send(aborted=self.abort_reason)
        remaining = super().kill()
        self._report_ends()
        self._messages.send(remaining=remaining)
        return remaining

    def wait_for_event(self, timeout: float, extra_fds: Collection[int] = ()) -> None:
        super().wait_for_event(timeout, [self._messages.read_fd, *extra_fds])


def main() -> int:
    """Answer calls, then run the ranks. Returns the exit code."""
    raise_open_files_limit()
    messages = MessagePipe(0, os.dup(1))
    os.dup2(2, 1)  # what anything else prints is no message; ssh writes stderr into the launching process's log
    while not messages.closed and time.monotonic() - messages.last_read_at < IDLE_SECONDS:
        wait_readable([messages.read_fd], IDLE_SECONDS)
        messages.receive()
        while messages.received:
            message = messages.received.popleft()
            if "start" in message:
                return run_ranks(messages, **message["start"])
            messages.send(reply=call(message["call"], message["arguments"]))
    return EXIT_FAILED


def call(function: str, arguments: Mapping[str, Any]) -> Any:
    """Call `MODULE:FUNCTION` and return what it returns."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def run_ranks(messages: MessagePipe, launch: dict[str, Any], run_dir: str, cwd: str, listener: int | None) -> int:
    """Run the ranks of this host to their end; return the exit code of supervision.

    `launch` has the fields of `Launch`, with the bounds of `ranks`; `listener` is the descriptor that
    `probe.open_port` has returned on rank 0's host.
    """
    os.chdir(cwd)
    host_launch = Launch(**launch | {"ranks": range(*launch["ranks"])})
    devices = [] if host_launch.use_cpu else host_launch.devices
    variables = {**os.environ, **host_launch.environment}
    host_launch = replace(host_launch, environment=host_environment(variables, devices, len(host_launch.ranks)))
    rank_0_socket = None if listener is None else socket.socket(fileno=listener)
    with os.fdopen(os.dup(2), "wb") as output:
        return supervise(HostWorkerGroup(host_launch, Path(run_dir), messages, rank_0_socket, output))


if __name__ == "__main__":
    sys.exit(main())
