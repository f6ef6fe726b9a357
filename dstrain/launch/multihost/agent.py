"""Agent on one host of a multi-host launch, started over ssh."""

# Usage: `python -m dstrain.launch.multihost.agent TIMEOUT NONCE`.
#
# Standard input and output are the channel to the launching process. The ranks are children of the agent, in its process
# group. If the channel is closed, or silent for TIMEOUT seconds, the agent kills every process of the launch on this
# host, so that nothing outlives the launching process. Ranks end with their agent (launch/worker.py).
#
# Request -> reply: hello -> host_info, open -> opened, reach -> reachability, start, signal, end -> remaining_pids,
# kill (another agent of this host, that does not answer) -> remaining_pids
# Sent without a request: ended (rank, `RankEnd`).
# Records are included, since the launching host may see files that another host wrote only later.

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from dstrain.errors import UsageError
from dstrain.launch.command import Launch, host_environment
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.probe import collect_host_info, try_connect
from dstrain.launch.processes import kill_processes, process_state, start_time
from dstrain.launch.spawn import LocalWorkerGroup, open_listener, wait_readable
from dstrain.process_setup import raise_open_files_limit, set_child_subreaper

_POLL_SECONDS = 0.1


class Agent:
    """Ranks of one launch on this host, and the handlers of the channel's requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._listener: socket.socket | None = None
        """Socket for the ranks, opened before the launch so that other hosts can test whether they reach it."""
        self._group: LocalWorkerGroup | None = None
        self._sent: set[int] = set()
        self._is_done = False
        self._handlers = self.make_handlers()

    def make_handlers(self) -> Mapping[str, Callable[[Any], None]]:
        """Return the handler of each request."""
        send = self._channel.send
        return {
            "hello": lambda request: send(host_info=collect_host_info(**request)),
            "open": lambda request: send(opened=self.open_listener(**request)),
            "reach": lambda request: send(reachability=try_connect(**request)),
            "start": lambda request: self.start_ranks(**request),
            "signal": self.send_signal,
            "end": lambda _: self._end(),
            "kill": lambda request: send(remaining_pids=kill_agent(**request)),
        }

    def serve(self) -> int:
        """Handle requests until the launch ends. Returns the exit code."""
        while not self._is_done:
            for message in self._channel.read_messages():
                for name, request in message.items():
                    self._handlers[name](request)
            if self._is_done:
                break
            if self._channel.closed or self._channel.is_timed_out():
                self.kill_all()
                return 1
            self.report_changes()
            self._channel.send_heartbeat()
            if self._group is None:
                wait_readable([self._channel.read_fd], _POLL_SECONDS)
            else:
                self._group.wait_for_event(_POLL_SECONDS, [self._channel.read_fd])
        return 0

    def kill_all(self) -> list[str]:
        """SIGKILL every process of the launch on this host. Returns the pids that did not end."""
        return [] if self._group is None else self._group.kill()

    def open_listener(self, address: str, port: int) -> dict[str, Any]:
        """Listen for the ranks. Returns the port, or a fault."""
        try:
            self._listener = open_listener(address, port)
        except UsageError as error:
            return {"fault": str(error)}
        return {"port": self._listener.getsockname()[1]}

    def start_ranks(self, launch: dict[str, Any], run_dir: str, cwd: str) -> None:
        """Start the ranks of this host. `launch` has the fields of `Launch`, with the bounds of `ranks`."""
        os.chdir(cwd)
        own = Launch(**launch | {"ranks": range(*launch["ranks"])})
        devices = [] if own.use_cpu else own.devices
        environment = host_environment({**os.environ, **own.environment}, devices, len(own.ranks))
        # Like the agent's own stderr, the ranks' output goes to the launching process's log of this host.
        output = os.fdopen(os.dup(2), "wb")
        self._group = LocalWorkerGroup(replace(own, environment=environment), Path(run_dir), self._listener, output)
        self._group.start()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the ranks."""
        if self._group is not None:
            self._group.send_signal(signum)

    def _end(self) -> None:
        remaining = self.kill_all()
        self.report_changes()
        self._channel.send(remaining_pids=remaining)
        self._is_done = True

    def report_changes(self) -> None:
        """Send which ranks have ended since the last call."""
        if self._group is None:
            return
        self._group.poll()
        for rank, end in self._group.ends.items():
            if rank not in self._sent:
                self._sent.add(rank)
                self._channel.send(ended=[rank, asdict(end)])


def serve(make_agent: Callable[[Channel], Agent]) -> int:
    """Serve the channel on stdin and stdout with the arguments of this process; what anything else prints goes to stderr."""
    with contextlib.suppress(PermissionError):  # it leads a session, and so a group
        os.setpgid(0, 0)
    raise_open_files_limit()
    write_fd = os.dup(1)
    os.dup2(2, 1)
    # Orphans of the ranks become its children, where they are found and killed.
    set_child_subreaper(True)
    agent = make_agent(Channel(0, write_fd, float(sys.argv[1]), sys.argv[2]))

    def kill_and_exit(*_: object) -> None:
        agent.kill_all()
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, kill_and_exit)
    return agent.serve()


def kill_agent(pid: int, started_at: str) -> list[int]:
    """SIGKILL another agent of this host and its ranks, its process group. Returns the pids that did not end.

    `started_at`: of the agent, since process ids are reused.
    """
    return kill_processes(lambda: _list_group(pid)) if start_time(pid) in ("", started_at) else []


def _list_group(group: int) -> list[psutil.Process]:
    """Return the running processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process_state(process.pid) not in ("gone", "Z"):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(serve(Agent))
