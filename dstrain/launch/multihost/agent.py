"""Agent on one host of a multi-host launch, started over ssh."""

# Usage: `python -m dstrain.launch.multihost.agent TIMEOUT NONCE`; `... kill PID START NONCE` ends an agent and its ranks.
#
# Standard input and output are the channel to the launching process. The ranks are children of the agent, in its process
# group. If the channel is closed, or silent for TIMEOUT seconds, the agent kills every process of the launch on this
# host, so that nothing outlives the launching process. Ranks end with their agent (launch/worker.py).
#
# Request -> reply: hello -> host_info, open -> opened, reach -> reachability, start, signal, end -> remaining_pids
# Sent without a request: ended (rank, exit code, record), killed (rank, evidence).
# Records are included, since the launching host may see files that another host wrote only later.

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from dstrain.launch.command import host_environment
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.probe import ReservedPort, collect_host_info, try_connect
from dstrain.launch.processes import kill_processes, process_state, start_time
from dstrain.launch.spawn import LocalWorkerGroup, RankSpec, wait_readable
from dstrain.launch.worker import AGENT_ENV, LAUNCH_ID_ENV, read_rank_record
from dstrain.process_setup import raise_open_files_limit, set_child_subreaper

_POLL_SECONDS = 0.1


class Agent:
    """Ranks of one launch on this host, and the handlers of the channel's requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._reserved_port = ReservedPort()
        self._run_dir, self._launch_id = Path(), ""
        self._group: LocalWorkerGroup | None = None
        self._sent: set[int] = set()
        self._is_done = False
        self._handlers = self.make_handlers()

    def make_handlers(self) -> Mapping[str, Callable[[Any], None]]:
        """Return the handler of each request."""
        send = self._channel.send
        return {
            "hello": lambda request: send(host_info=collect_host_info(**request)),
            "open": lambda request: send(opened=self._reserved_port.bind(**request)),
            "reach": lambda request: send(reachability=try_connect(**request)),
            "start": self.start_ranks,
            "signal": self.send_signal,
            "end": lambda _: self._kill_and_report(),
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

    def start_ranks(self, request: Mapping[str, Any]) -> None:
        """Start the ranks of this host."""
        self._reserved_port.reserve()
        self._run_dir, ranks = Path(request["run_dir"]), range(*request["ranks"])
        environment = {**os.environ, **request["environment"]}
        self._launch_id = environment.get(LAUNCH_ID_ENV, "")
        devices = [] if environment.get("DS_ACCELERATOR") == "cpu" else [*map(str, request["slots"])]
        environment = host_environment(environment, devices, len(ranks))
        environment[AGENT_ENV] = f"{self._channel.heartbeat_timeout:g}"
        if request["interface"]:
            environment.setdefault("GLOO_SOCKET_IFNAME", request["interface"])
        address, port = request["master"]
        spec = RankSpec(
            argv=request["argv"], environment=environment, ranks=ranks,
            world_size=request["world_size"], master_addr=address, master_port=port, cwd=request["cwd"],
            # Like the agent's own stderr, their output goes to the launching process's log of this host.
            output=os.fdopen(os.dup(2), "wb"),
            new_sessions=False,
        )  # fmt: skip
        self._group = LocalWorkerGroup(spec, self._run_dir)
        self._group.start()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the ranks."""
        if self._group is not None:
            self._group.send_signal(signum)

    def _kill_and_report(self) -> None:
        remaining = self.kill_all()
        self.report_changes()
        self._channel.send(remaining_pids=remaining)
        self._is_done = True

    def report_changes(self) -> None:
        """Send which ranks have ended since the last call."""
        if self._group is None:
            return
        self._group.poll()
        for rank, code in self._group.exit_codes.items():
            if rank in self._sent:
                continue
            self._sent.add(rank)
            if reason := self._group.kill_reasons.get(rank):
                self._channel.send(killed=[rank, reason])
            record = read_rank_record(self._run_dir, rank, self._launch_id)
            self._channel.send(ended=[rank, code, None if record is None else asdict(record)])


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


def kill_agent(pid: int, started_at: str, nonce: str) -> int:
    """SIGKILL an agent of this host and its ranks, its process group. Returns 0 if none remains, else 1.

    `started_at`: of the agent, since process ids are reused.
    """
    remaining: list[int] = []
    if start_time(pid) in ("", started_at):
        remaining = kill_processes(lambda: _list_group(pid))
    print(f"\n{nonce} ended: {len(remaining)} left", flush=True)
    return bool(remaining)


def _list_group(group: int) -> list[psutil.Process]:
    """Return the running processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process_state(process.pid) not in ("gone", "Z"):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(kill_agent(int(sys.argv[2]), *sys.argv[3:5]) if sys.argv[1] == "kill" else serve(Agent))
