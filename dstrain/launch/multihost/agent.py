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

from dstrain.launch.job import LocalCrew, Program
from dstrain.launch.multihost.channel import Line
from dstrain.launch.multihost.heartbeat import Heartbeat
from dstrain.launch.multihost.probe import Meeting, facts, reach
from dstrain.launch.processes import end_these, marked
from dstrain.launch.rank_monitor import Ranks
from dstrain.launch.worker import LAUNCH, LAUNCH_ID, adopt_orphans, read_records

_TICK_SECONDS = 0.1


class Agent:
    """One launch on this host."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._heartbeat = Heartbeat(line.silence)
        self._meeting = Meeting()
        self._mark = ""
        """Path of the launch file, which every process of the launch has in its command line or its environment."""
        self._run_dir = Path()
        self._launch_id = ""
        self._ranks = Ranks(Path(), ())
        self._starter: LocalCrew | None = None
        self._told: set[int] = set()
        self._told_ended: set[int] = set()
        self._launcher_told = self._over = False
        self._acts: Mapping[str, Callable[[Any], None]] = {
            "hello": lambda asked: line.send(
                facts={**facts(**asked), "heartbeat": self._heartbeat.name, "token": self._heartbeat.token}
            ),
            "open": lambda asked: line.send(opened=self._meeting.open(**asked)),
            "reach": lambda asked: line.send(reached=reach(**asked)),
            "start": self._start,
            "signal": self._signal,
            "end": lambda _: self._finish(),
        }

    def serve(self) -> int:
        """Until it is over, one way or the other."""
        while not self._over:
            for message in self._line.receive():
                for name, asked in message.items():
                    self._acts[name](asked)
            if self._over:
                break
            if self._line.closed or self._line.silent():
                self.end()
                return 1
            self._tell()
            self._line.beat()
            self._heartbeat.beat()
            self._ranks.rest(_TICK_SECONDS, [self._line.read])
        return 0

    def end(self) -> list[int]:
        """SIGKILL every process of the launch on this host. Returns what would not end."""
        if not self._mark:
            return []
        if self._starter is not None:
            self._starter.end()
        return end_these(lambda: marked(self._mark, LAUNCH))

    def _start(self, asked: Mapping[str, Any]) -> None:
        """Watch for these ranks of a run; `argv`: what starts them, where that is not done from elsewhere."""
        self._meeting.reserve()
        self._heartbeat.hand_out(asked["environment"])
        self._mark = asked["launch"]
        self._run_dir, argv, self._launch_id = Path(asked["run_dir"]), asked["argv"], asked.get("launch_id", "")
        if argv is None:
            self._ranks = Ranks(self._run_dir, asked["ranks"], self._launch_id)
            return
        # The agent's own output goes to the launching process's log of the launchers; so does this one's.
        output = os.fdopen(os.dup(2), "wb")
        environment = {**os.environ, **asked["env"], LAUNCH_ID: self._launch_id}
        program = Program(argv, environment, asked["cwd"], output)
        self._starter = LocalCrew(program, self._run_dir, asked["ranks"])
        self._starter.start()
        self._ranks = self._starter.seen

    def _signal(self, number: int) -> None:
        for pid in self._ranks.alive.values():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _finish(self) -> None:
        left = self.end()
        self._ranks.look(again=True)
        self._tell()
        self._line.send(left=left)
        self._over = True

    def _tell(self) -> None:
        """What became of the ranks since."""
        self._ranks.look()
        ended = [rank for rank in self._ranks.ends if rank not in self._told_ended]
        started = self._ranks.alive.keys() - self._told
        if started or ended:
            records = {rank: asdict(record) for rank, record in read_records(self._run_dir, self._launch_id).items()}
            for rank in started:
                self._line.send(started=[rank, None, records.get(rank)])
            for rank in ended:
                self._line.send(ended=[rank, self._ranks.ends[rank], records.get(rank)])
            self._told.update(started)
            self._told_ended.update(ended)
        code = None if self._starter is None else self._starter.over()
        if code is not None and not self._launcher_told:
            self._launcher_told = True
            self._line.send(launcher=code)


def main() -> int:
    """Keep the lifeline apart from what anything else prints."""
    write = os.dup(1)
    os.dup2(2, 1)
    adopt_orphans(True)
    agent = Agent(Line(0, write, float(sys.argv[1]), sys.argv[2]))

    def leave(*_: object) -> None:
        agent.end()
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    return agent.serve()


if __name__ == "__main__":
    sys.exit(main())
