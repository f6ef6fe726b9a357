"""Ranks as children of this process: start, exit codes, signals, end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from dstrain.distributed.store import LISTENER_ENV
from dstrain.host_limits import describe_oom_kill, read_oom_kills
from dstrain.launch.plan import Launch
from dstrain.launch.probe import open_listener
from dstrain.launch.processes import STOPPED_STATES, descendants, kill_descendants, process_state
from dstrain.launch.worker import (
    HOST_ONLY_VARIABLES,
    HOST_TIMEOUT_ENV,
    LAUNCH_ID_ENV,
    SUPERVISOR_ENV,
    RankRecord,
    read_rank_record,
)
from dstrain.process_setup import set_parent_death_signal

_REAP_SECONDS = 5.0


@dataclass(frozen=True)
class RankEnd:
    """How the process of a rank ended."""

    status: int | None
    """Exit code, or minus the signal; None where nobody could see it."""
    record: RankRecord | None = None
    """What the rank wrote; None if it did not begin."""
    kill_reason: str = ""
    """Evidence that the kernel killed it because memory was full."""
    was_stopped: bool = False
    """True if the process was stopped (SIGSTOP, or a debugger) when the launch was ended."""

    @property
    def code(self) -> int | None:
        """Exit code: the recorded one counts, since a process that is done may die while Python shuts down."""
        return self.status if self.record is None else self.record.exit


class WorkerGroup(ABC):
    """Ranks of a launch, on one host or several: what supervision needs of them."""

    def __init__(self, launch: Launch, run_dir: Path) -> None:
        self.launch, self.run_dir = launch, run_dir
        self.ends: dict[int, RankEnd] = {}
        """How ranks ended, in the order seen."""
        self.abort_reason = ""
        """Reason to end the launch regardless of its ranks, such as a lost host; empty if there is none."""

    @property
    @abstractmethod
    def alive_ranks(self) -> Collection[int]:
        """Ranks that have started and not ended."""

    @abstractmethod
    def find_stopped_ranks(self) -> set[int]:
        """Return the ranks that have not ended and are stopped (SIGSTOP, or a debugger): they cannot react."""

    @abstractmethod
    def start(self) -> None:
        """Start the ranks."""

    @abstractmethod
    def poll(self) -> None:
        """Update the state of the ranks."""

    @abstractmethod
    def send_signal(self, signum: int) -> int:
        """Send a signal to the ranks. Returns the number of ranks reached."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Return True if a process of the group runs, a child of a rank included."""

    @abstractmethod
    def kill(self) -> list[str]:
        """SIGKILL all processes of the group. Returns those that did not end."""

    @abstractmethod
    def wait_for_event(self, timeout: float) -> None:
        """Sleep until a rank ends or a message arrives, at most `timeout` seconds."""

    def find_output(self, rank: int) -> Path | None:
        """Return the file with what the rank printed before its own log; None if that is on the terminal."""
        return None


class LocalWorkerGroup(WorkerGroup):
    """Ranks of this host, children of this process.

    On a host that is reached over ssh, `listener` is the socket for rank 0 that was opened before the start, and `output`
    the file for what a rank prints before it opens its log; stdin is then /dev/null.
    """

    def __init__(
        self, launch: Launch, run_dir: Path, listener: socket.socket | None = None, output: IO[bytes] | None = None
    ) -> None:
        super().__init__(launch, run_dir)
        self._listener, self._output = listener, output
        self._launch_id = launch.environment.get(LAUNCH_ID_ENV, "")
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._oom_kills = read_oom_kills()
        self._excluded_pids: set[int] = set()
        self._stopped_ranks: set[int] = set()

    @property
    def alive_ranks(self) -> Collection[int]:
        return self._children.keys() - self.ends.keys()

    def find_stopped_ranks(self) -> set[int]:
        return {rank for rank in self.alive_ranks if process_state(self._children[rank].pid) in STOPPED_STATES}

    def start(self) -> None:
        # Children from before are not of this launch.
        self._excluded_pids = {child.pid for child in psutil.Process().children()}
        launch = self.launch
        if self._listener is None and 0 in launch.ranks and launch.world_size > 1:
            self._listener = open_listener(launch.master_addr, launch.master_port)
        port = launch.master_port if self._listener is None else self._listener.getsockname()[1]
        # Variables of a launch around this one are dropped; what torchrun and DeepSpeed's launcher set is set.
        dropped = (*HOST_ONLY_VARIABLES, "MASTER_PORT")
        environment = {name: value for name, value in launch.environment.items() if name not in dropped}
        environment |= {
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_WORLD_SIZE": str(len(launch.ranks)),
            "MASTER_ADDR": launch.master_addr,
            **({"MASTER_PORT": str(port)} if port else {}),
            SUPERVISOR_ENV: f"{socket.gethostname()} {os.getpid()}",
            **({HOST_TIMEOUT_ENV: f"{launch.heartbeat_timeout:g}"} if launch.heartbeat_timeout else {}),
        }
        for rank in launch.ranks:
            rank_env = {"RANK": str(rank), "LOCAL_RANK": str(rank - launch.ranks.start)}
            listener = [self._listener.fileno()] if self._listener is not None and rank == 0 else []
            if listener:
                rank_env[LISTENER_ENV] = str(*listener)
            child = subprocess.Popen(
                list(launch.argv),
                env=environment | rank_env,
                pass_fds=listener,
                stdin=None if self._output is None else subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output and subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
                preexec_fn=_prepare_rank,
            )
            self._children[rank] = child
            with contextlib.suppress(OSError, AttributeError):  # it has ended, or a kernel before 5.3
                self._pidfds[rank] = os.pidfd_open(child.pid)
        if self._listener is not None:  # it ends with rank 0, so that the others notice
            self._listener.close()

    def poll(self) -> None:
        codes = {rank: self._children[rank].poll() for rank in self.alive_ranks}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        # The first rank in `ends` is the one to blame. Of those seen in one poll killed ranks come first: the
        # others lost their connection to them.
        for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):
            is_killed = ended[rank] == -signal.SIGKILL
            reason = describe_oom_kill(self._children[rank].pid, self._oom_kills) if is_killed else ""
            self.ends[rank] = RankEnd(ended[rank], self._read_record(rank), reason, rank in self._stopped_ranks)
            if rank in self._pidfds:
                os.close(self._pidfds.pop(rank))

    def _read_record(self, rank: int) -> RankRecord | None:
        return read_rank_record(self.run_dir, rank, self._launch_id)

    def send_signal(self, signum: int) -> int:
        reached = [*self.alive_ranks]
        for rank in reached:
            self._children[rank].send_signal(signum)
        return len(reached)

    def is_alive(self) -> bool:
        return bool(descendants(self._excluded_pids))

    def kill(self) -> list[str]:
        if not self._children:
            return []
        self._stopped_ranks = self.find_stopped_ranks()
        remaining = kill_descendants(self._excluded_pids, [child.pid for child in self._children.values()])
        for child in self._children.values():
            if child.pid not in remaining:
                # Its main thread has ended; others of a killed process may take a moment more.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_REAP_SECONDS)
        self.poll()
        for rank in self.alive_ranks:  # it hangs in the kernel, perhaps after its work was done
            self.ends[rank] = RankEnd(None, self._read_record(rank))
        return [str(pid) for pid in remaining]

    def wait_for_event(self, timeout: float, extra_fds: Collection[int] = ()) -> None:
        wait_readable((*self._pidfds.values(), *extra_fds), timeout)


def _prepare_rank() -> None:
    """Tie a rank to the end of this process. SIGUSR1, which asks for a checkpoint, must not end a rank that starts."""
    set_parent_death_signal()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def wait_readable(fds: Iterable[int], timeout: float) -> None:
    """Sleep until a descriptor is readable, at most `timeout` seconds."""
    poll = select.poll()
    for descriptor in fds:
        poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * timeout)
