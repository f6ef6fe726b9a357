"""Ranks as children of this process: start, exit codes, signals, end."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.host_memory import describe_oom_kill, read_oom_kills
from dstrain.launch.command import PORT_FILE_ENV, LocalLaunch
from dstrain.launch.processes import descendants, kill_descendants
from dstrain.launch.worker import (
    AGENT_ENV,
    LAUNCH_ID_ENV,
    SUPERVISOR_ENV,
    RankRecord,
    get_workers_dir,
    read_rank_record,
)
from dstrain.process_setup import set_parent_death_signal

_REAP_SECONDS = 5.0


class WorkerGroup(Protocol):
    """Ranks of a launch, on one host or several."""

    run_dir: Path

    @property
    def ranks(self) -> Collection[int]:
        """Ranks whose ends decide how the launch ended."""

    @property
    def alive_ranks(self) -> Collection[int]:
        """Ranks that have started and not ended."""

    @property
    def exit_codes(self) -> Mapping[int, int | None]:
        """Exit code by rank, or minus the signal, in the order seen."""

    @property
    def kill_reasons(self) -> Mapping[int, str]:
        """Evidence that the kernel killed a rank because memory was full, by rank."""

    @property
    def records(self) -> Mapping[int, RankRecord]:
        """Records that the ranks wrote, by rank."""

    abort_reason: str
    """Reason to end the launch regardless of its ranks, such as a lost host; empty if there is
    none."""

    def start(self) -> None:
        """Start the ranks."""

    def poll(self) -> None:
        """Update the state of the ranks."""

    def send_signal(self, signum: int) -> int:
        """Send a signal to the ranks. Returns the number of ranks reached."""

    def is_alive(self) -> bool:
        """Return True if a process of the group runs, a child of a rank included."""

    def kill(self) -> list[str]:
        """SIGKILL all processes of the group. Returns those that did not end."""

    def wait_for_event(self, timeout: float) -> None:
        """Sleep until a rank ends or a message arrives, at most `timeout` seconds."""

    def find_output(self, rank: int | None) -> Path | None:
        """Return the file with what the rank printed before its own log; None if that is on the terminal."""


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Ranks of one host: their command, and what their environment needs."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    """Variables of all ranks of the host."""
    ranks: range
    world_size: int
    master_addr: str
    master_port: int
    cwd: str | None = None
    output: IO[bytes] | None = None
    """File for what a rank prints before it opens its log; stdin is then /dev/null. None: the streams of this process."""
    new_sessions: bool = True
    """Start each rank in a session of its own, so that Ctrl-C in a terminal reaches this process only."""

    def rank_environment(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank, with the variables that torchrun and DeepSpeed's launcher set."""
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank - self.ranks.start,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": len(self.ranks),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            SUPERVISOR_ENV: f"{socket.gethostname()} {os.getpid()}",
        }
        return {**self.environment, **{name: str(value) for name, value in place.items()}}


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a rank of `dstrain ARGUMENTS`."""
    return [sys.executable, "-u", "-m", "dstrain.cli", *arguments]


def make_local_group(launch: LocalLaunch, run_dir: Path) -> LocalWorkerGroup:
    """Return the group of a launch on this host, with a new file by which rank 0 announces the port
    it listens on.
    """
    # The second is of a launch from inside of another one's rank.
    environment = {name: value for name, value in launch.environment.items() if name not in (PORT_FILE_ENV, AGENT_ENV)}
    if launch.allow_any_port:
        environment[PORT_FILE_ENV] = str(get_workers_dir(run_dir) / f"port-{secrets.token_hex(8)}")
    if launch.local_ranks is None:  # with --no-ssh, each host starts its own ranks: the user gives all the same key
        environment[RANK_KEY_ENV] = secrets.token_hex(16)
    spec = RankSpec(
        argv=rank_command(launch.arguments), environment=environment, ranks=launch.ranks,
        world_size=launch.world_size, master_addr=launch.master_addr, master_port=launch.master_port,
    )  # fmt: skip
    return LocalWorkerGroup(spec, run_dir)


class LocalWorkerGroup:
    """Ranks of this host, children of this process."""

    def __init__(self, spec: RankSpec, run_dir: Path) -> None:
        self.run_dir, self.ranks, self.abort_reason = run_dir, spec.ranks, ""
        self.exit_codes: dict[int, int | None] = {}
        self.kill_reasons: dict[int, str] = {}
        self._spec = spec
        self._launch_id = spec.environment.get(LAUNCH_ID_ENV, "")
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._oom_kills = read_oom_kills()
        self._excluded_pids: set[int] = set()

    @property
    def alive_ranks(self) -> Collection[int]:
        return self._children.keys() - self.exit_codes.keys()

    @property
    def records(self) -> Mapping[int, RankRecord]:
        found = {rank: read_rank_record(self.run_dir, rank, self._launch_id) for rank in self._children}
        return {rank: record for rank, record in found.items() if record is not None}

    def start(self) -> None:
        # Children from before are not of this launch.
        self._excluded_pids = {child.pid for child in psutil.Process().children()}
        for rank in self.ranks:
            child = subprocess.Popen(
                list(self._spec.argv),
                env=self._spec.rank_environment(rank),
                cwd=self._spec.cwd,
                stdin=None if self._spec.output is None else subprocess.DEVNULL,
                stdout=self._spec.output,
                stderr=self._spec.output and subprocess.STDOUT,
                start_new_session=self._spec.new_sessions,
                preexec_fn=_prepare_rank,
            )
            self._children[rank] = child
            with contextlib.suppress(OSError, AttributeError):  # it has ended, or a kernel before 5.3
                self._pidfds[rank] = os.pidfd_open(child.pid)

    def poll(self) -> None:
        codes = {rank: self._children[rank].poll() for rank in self.alive_ranks}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        # The first rank in `exit_codes` is the one to blame. Of those seen in one poll killed ranks come first: the
        # others lost their connection to them.
        for rank in sorted(ended, key=lambda rank: ended[rank] >= 0):
            self.exit_codes[rank] = ended[rank]
            if ended[rank] == -signal.SIGKILL and (
                reason := describe_oom_kill(self._children[rank].pid, self._oom_kills)
            ):
                self.kill_reasons[rank] = reason
            if rank in self._pidfds:
                os.close(self._pidfds.pop(rank))

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
        remaining = kill_descendants(self._excluded_pids, [child.pid for child in self._children.values()])
        for child in self._children.values():
            if child.pid not in remaining:
                # Its main thread has ended; others of a killed process may take a moment more.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_REAP_SECONDS)
        self.poll()
        return [str(pid) for pid in remaining]

    def wait_for_event(self, timeout: float, extra_fds: Collection[int] = ()) -> None:
        wait_readable((*self._pidfds.values(), *extra_fds), timeout)

    def find_output(self, rank: int | None) -> Path | None:
        return None


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
