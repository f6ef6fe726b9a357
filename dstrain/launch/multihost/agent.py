"""What watches over the ranks of one host: `python -m dstrain.launch.multihost.agent SILENCE NONCE`, started over ssh.

Its standard input and output are its lifeline to the launching process. When that is cut, or silent for too long,
every process of the launch on this host is killed: a launch that lost its head leaves nothing behind. The ranks get the
environment of the launch from it, and end themselves when it no longer beats (`launch/heartbeat.py`).

Asked -> answers:  hello -> facts · open -> port · reach -> interface · start · signal · end -> left
By itself it tells: started and ended (a rank, how its process ended, its record), launcher (its return code).
The records go with it as the files of another host may be seen late.
"""

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
from dstrain.launch.job import LauncherSpec, LocalJob
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.probe import ReservedPort, collect_host_info, try_connect
from dstrain.launch.processes import find_processes, has_marker, kill_processes
from dstrain.launch.rank_monitor import RankMonitor
from dstrain.launch.worker import LAUNCH_FILE_ENV, LAUNCH_ID_ENV, read_rank_records, set_child_subreaper

_POLL_SECONDS = 0.1


class Agent:
    """One launch on this host."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._heartbeat = HeartbeatServer(channel.heartbeat_timeout)
        self._reserved_port = ReservedPort()
        self._launch_file = ""
        """Path of the launch file, which every process of the launch has in its command line or its environment."""
        self._run_dir = Path()
        self._launch_id = ""
        self._monitor = RankMonitor(Path(), ())
        self._local_job: LocalJob | None = None
        self._sent_started: set[int] = set()
        self._sent_exits: set[int] = set()
        self._has_sent_launcher_code = self._is_done = False
        self._handlers: Mapping[str, Callable[[Any], None]] = {
            "hello": lambda asked: channel.send(
                facts={
                    **collect_host_info(**asked),
                    "heartbeat": self._heartbeat.socket_name,
                    "token": self._heartbeat.token,
                }
            ),
            "open": lambda asked: channel.send(opened=self._reserved_port.bind(**asked)),
            "reach": lambda asked: channel.send(reached=try_connect(**asked)),
            "start": self.start_ranks,
            "signal": self.send_signal,
            "end": lambda _: self._kill_and_report(),
        }

    def serve(self) -> int:
        """Until it is over, one way or the other."""
        while not self._is_done:
            for message in self._channel.read_messages():
                for name, asked in message.items():
                    self._handlers[name](asked)
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
        """SIGKILL every process of the launch on this host. Returns what would not end."""
        if not self._launch_file:
            return []
        if self._local_job is not None:
            self._local_job.kill()
        file = self._launch_file
        return kill_processes(lambda: find_processes(lambda words, env: has_marker(words, env, file, LAUNCH_FILE_ENV)))

    def start_ranks(self, spec: Mapping[str, Any]) -> None:
        """Watch for these ranks of a run; `argv`: what starts them, where that is not done from elsewhere."""
        self._reserved_port.reserve()
        self._heartbeat.set_environment(spec["environment"])
        self._launch_file = spec["launch"]
        self._run_dir, argv, self._launch_id = Path(spec["run_dir"]), spec["argv"], spec.get("launch_id", "")
        if argv is None:
            self._monitor = RankMonitor(self._run_dir, spec["ranks"], self._launch_id)
            return
        # The agent's own output goes to the launching process's log of the launchers; so does this one's.
        output = os.fdopen(os.dup(2), "wb")
        environment = {**os.environ, **spec["env"], LAUNCH_ID_ENV: self._launch_id}
        program = LauncherSpec(argv, environment, spec["cwd"], output)
        self._local_job = LocalJob(program, self._run_dir, spec["ranks"])
        self._local_job.start()
        self._monitor = self._local_job.monitor

    def send_signal(self, signum: int) -> None:
        for pid in self._monitor.alive_pids.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signum)

    def _kill_and_report(self) -> None:
        left = self.kill_all()
        self._monitor.poll(force=True)
        self.report_changes()
        self._channel.send(left=left)
        self._is_done = True

    def report_changes(self) -> None:
        """What became of the ranks since."""
        self._monitor.poll()
        ended = [rank for rank in self._monitor.exit_codes if rank not in self._sent_exits]
        started = self._monitor.alive_pids.keys() - self._sent_started
        if started or ended:
            records = {
                rank: asdict(record) for rank, record in read_rank_records(self._run_dir, self._launch_id).items()
            }
            for rank in started:
                self._channel.send(started=[rank, None, records.get(rank)])
            for rank in ended:
                self._channel.send(ended=[rank, self._monitor.exit_codes[rank], records.get(rank)])
            self._sent_started.update(started)
            self._sent_exits.update(ended)
        code = None if self._local_job is None else self._local_job.poll_launcher()
        if code is not None and not self._has_sent_launcher_code:
            self._has_sent_launcher_code = True
            self._channel.send(launcher=code)


def main() -> int:
    """Keep the lifeline apart from what anything else prints."""
    write = os.dup(1)
    os.dup2(2, 1)
    set_child_subreaper(True)
    agent = Agent(Channel(0, write, float(sys.argv[1]), sys.argv[2]))

    def kill_and_exit(*_: object) -> None:
        agent.kill_all()
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, kill_and_exit)
    return agent.serve()


if __name__ == "__main__":
    sys.exit(main())
