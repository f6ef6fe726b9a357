"""Agent on one host of a multi-host launch, started over ssh."""

# Usage: `python -m dstrain.launch.multihost.agent TIMEOUT NONCE`.
#
# Standard input and output are the channel to the launching process. If it is closed, or silent for
# TIMEOUT seconds, the agent kills every process of the launch on this host, so that nothing
# outlives the launching process. It hands the launch environment to the ranks, which end themselves
# without its heartbeat (launch/heartbeat.py).
#
# Request -> reply: hello -> host_info, open -> opened, reach -> reachability, start, signal, end -> remaining_pids
# Sent without a request: started and ended (rank, exit code, record), launcher (its exit code).
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

from dstrain.launch.heartbeat import HeartbeatServer
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.probe import ReservedPort, collect_host_info, try_connect
from dstrain.launch.processes import find_processes, has_marker, kill_processes
from dstrain.launch.rank_monitor import RankMonitor
from dstrain.launch.worker import LAUNCH_FILE_ENV, LAUNCH_ID_ENV, read_rank_records, set_child_subreaper
from dstrain.launch.worker_group import LauncherSpec, LocalWorkerGroup

_POLL_SECONDS = 0.1


class Agent:
    """Ranks of one launch on this host, and the handlers of the channel's requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._heartbeat = HeartbeatServer(channel.heartbeat_timeout)
        self._reserved_port = ReservedPort()
        self._launch_file = ""
        """Path of the launch file; each process of the launch has it in its command line or
        environment."""
        self._run_dir = Path()
        self._launch_id = ""
        self._monitor = RankMonitor(Path(), ())
        self._local_group: LocalWorkerGroup | None = None
        self._sent_started: set[int] = set()
        self._sent_exits: set[int] = set()
        self._has_sent_launcher_code = self._is_done = False
        self._handlers: Mapping[str, Callable[[Any], None]] = {
            "hello": lambda request: channel.send(
                host_info={
                    **collect_host_info(**request),
                    "heartbeat": self._heartbeat.socket_name,
                    "token": self._heartbeat.token,
                }
            ),
            "open": lambda request: channel.send(opened=self._reserved_port.bind(**request)),
            "reach": lambda request: channel.send(reachability=try_connect(**request)),
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
            self._heartbeat.send_heartbeats()
            self._monitor.wait_for_event(_POLL_SECONDS, [self._channel.read_fd])
        return 0

    def kill_all(self) -> list[int]:
        """SIGKILL every process of the launch on this host. Returns the pids that did not end."""
        if not self._launch_file:
            return []
        if self._local_group is not None:
            self._local_group.kill()
        file = self._launch_file
        return kill_processes(lambda: find_processes(lambda words, env: has_marker(words, env, file, LAUNCH_FILE_ENV)))

    def start_ranks(self, spec: Mapping[str, Any]) -> None:
        """Start and watch ranks.

        `spec["argv"]` is their launcher; None if another host starts them (pdsh, mpirun).
        """
        self._reserved_port.reserve()
        self._heartbeat.set_environment(spec["environment"])
        self._launch_file = spec["launch"]
        self._run_dir, argv, self._launch_id = Path(spec["run_dir"]), spec["argv"], spec.get("launch_id", "")
        if argv is None:
            self._monitor = RankMonitor(self._run_dir, spec["ranks"], self._launch_id)
            return
        # Like the agent's own stderr, the launcher's output goes to the launching process's log of
        # this host.
        output = os.fdopen(os.dup(2), "wb")
        environment = {**os.environ, **spec["env"], LAUNCH_ID_ENV: self._launch_id}
        launcher = LauncherSpec(argv, environment, spec["cwd"], output)
        self._local_group = LocalWorkerGroup(launcher, self._run_dir, spec["ranks"])
        self._local_group.start()
        self._monitor = self._local_group.monitor

    def send_signal(self, signum: int) -> None:
        """Send a signal to the ranks."""
        for pid in self._monitor.alive_pids.values():
            with contextlib.suppress(OSError):  # it has ended
                os.kill(pid, signum)

    def _kill_and_report(self) -> None:
        remaining = self.kill_all()
        # Once more: the ranks have just been killed, and their records may be new.
        self._monitor.poll(force=True)
        self.report_changes()
        self._channel.send(remaining_pids=remaining)
        self._is_done = True

    def report_changes(self) -> None:
        """Send which ranks have started and ended since the last call."""
        self._monitor.poll()
        ended = [rank for rank in self._monitor.exit_codes if rank not in self._sent_exits]
        started = self._monitor.alive_pids.keys() - self._sent_started
        if started or ended:
            records = {
                rank: asdict(record) for rank, record in read_rank_records(self._run_dir, self._launch_id).items()
            }
            for rank in started:
                self._channel.send(started=[rank, None, records.get(rank)])
            for rank, reason in self._monitor.kill_reasons.items():
                if rank in ended:
                    self._channel.send(killed=[rank, reason])
            for rank in ended:
                self._channel.send(ended=[rank, self._monitor.exit_codes[rank], records.get(rank)])
            self._sent_started.update(started)
            self._sent_exits.update(ended)
        code = None if self._local_group is None else self._local_group.poll_launcher()
        if code is not None and not self._has_sent_launcher_code:
            self._has_sent_launcher_code = True
            self._channel.send(launcher=code)


def main() -> int:
    """Serve the channel on stdin and stdout; what anything else prints goes to stderr."""
    write_fd = os.dup(1)
    os.dup2(2, 1)
    # Orphans of the launcher become its children, where they are found and killed.
    set_child_subreaper(True)
    agent = Agent(Channel(0, write_fd, float(sys.argv[1]), sys.argv[2]))

    def kill_and_exit(*_: object) -> None:
        agent.kill_all()
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, kill_and_exit)
    return agent.serve()


if __name__ == "__main__":
    sys.exit(main())
