"""Worker group (a launcher and its ranks): interface, and single-host implementation."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.launch.command import PORT_FILE_ENV, LocalLaunch
from dstrain.launch.processes import descendants, find_workers, kill_descendants
from dstrain.launch.rank_monitor import RankMonitor
from dstrain.launch.worker import (
    LAUNCH_ID_ENV,
    SUPERVISOR_ENV,
    RankRecord,
    get_workers_dir,
    read_rank_records,
    remove_rank_records,
    set_parent_death_signal,
)


class WorkerGroup(Protocol):
    """Launcher and ranks of a launch, on one host or several."""

    run_dir: Path

    @property
    def ranks(self) -> Collection[int]:
        """Ranks whose records decide how the launch ended."""

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
        """Start the launcher."""

    def poll(self, force: bool = False) -> None:
        """Update the state of the ranks."""

    def poll_launcher(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""

    def send_signal(self, signum: int) -> int:
        """Send a signal to the ranks. Returns the number of ranks reached."""

    def is_alive(self) -> bool:
        """Return True if a process of the group runs."""

    def kill(self) -> list[str]:
        """SIGKILL all processes of the group. Returns those that did not end."""

    def wait_for_event(self, timeout: float) -> None:
        """Sleep until a rank ends or a message arrives, at most `timeout` seconds."""

    def find_launcher_log(self, rank: int | None) -> Path | None:
        """Return the log of the launcher that started the rank; None if it writes to the terminal."""


def make_local_group(launch: LocalLaunch, run_dir: Path) -> LocalWorkerGroup:
    """Return the group of a launch on this host, with a new file by which rank 0 announces the port
    it listens on.
    """
    environment = {name: value for name, value in launch.environment.items() if name != PORT_FILE_ENV}
    if launch.allow_any_port:
        environment[PORT_FILE_ENV] = str(get_workers_dir(run_dir) / f"port-{secrets.token_hex(8)}")
    if launch.local_ranks is None:  # with --no-ssh, each host starts its own ranks: the user gives all the same key
        environment[RANK_KEY_ENV] = secrets.token_hex(16)
    return LocalWorkerGroup(LauncherSpec(launch.argv, environment), run_dir, launch.ranks)


@dataclass(frozen=True)
class LauncherSpec:
    """Command, environment and output of a launcher."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None = None
    stdout: IO[bytes] | None = None
    """Output file; stdin is then /dev/null. None: the streams of this process."""


class LocalWorkerGroup:
    """Worker group on this host: the launcher, a child of this process, and its descendants."""

    def __init__(self, spec: LauncherSpec, run_dir: Path, ranks: Collection[int]) -> None:
        self.run_dir, self.ranks, self.abort_reason = run_dir, ranks, ""
        self._spec = spec
        self._launch_id = spec.environment.get(LAUNCH_ID_ENV, "")
        self.monitor = RankMonitor(run_dir, ranks, self._launch_id)
        self._excluded_pids: set[int] = set()
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def alive_ranks(self) -> Mapping[int, int]:
        return self.monitor.alive_pids

    @property
    def exit_codes(self) -> Mapping[int, int | None]:
        return self.monitor.exit_codes

    @property
    def kill_reasons(self) -> Mapping[int, str]:
        return self.monitor.kill_reasons

    @property
    def records(self) -> Mapping[int, RankRecord]:
        return {
            rank: record
            for rank, record in read_rank_records(self.run_dir, self._launch_id).items()
            if rank in self.ranks
        }

    def start(self) -> None:
        if not self._launch_id:  # else the launch id is in the records' names
            remove_rank_records(self.run_dir, self.ranks)
        # Children from before are not of this launch.
        self._excluded_pids = {child.pid for child in psutil.Process().children()}
        self._launcher = subprocess.Popen(
            list(self._spec.argv),
            env={**self._spec.environment, SUPERVISOR_ENV: f"{socket.gethostname()} {psutil.Process().pid}"},
            cwd=self._spec.cwd,
            stdin=None if self._spec.stdout is None else subprocess.DEVNULL,
            stdout=self._spec.stdout,
            stderr=self._spec.stdout and subprocess.STDOUT,
            # Ctrl-C in the terminal reaches this process only, which forwards it to the workers.
            start_new_session=True,
            # The launcher must not outlive this process.
            preexec_fn=set_parent_death_signal,
        )

    def poll(self, force: bool = False) -> None:
        self.monitor.poll(force)

    def poll_launcher(self) -> int | None:
        return None if self._launcher is None else self._launcher.poll()

    def send_signal(self, signum: int) -> int:
        """Send it to the workers, not to the launchers between: those would not wait for a
        checkpoint.
        """
        reached = find_workers(descendants(self._excluded_pids))
        for worker in reached:
            with contextlib.suppress(psutil.Error):
                worker.send_signal(signum)
        return len(reached)

    def is_alive(self) -> bool:
        return bool(descendants(self._excluded_pids))

    def kill(self) -> list[str]:
        if self._launcher is None:
            return []
        remaining = kill_descendants(self._excluded_pids, self._launcher.pid)
        if self._launcher.pid not in remaining:
            # Reaped, so that its exit code is known.
            self._launcher.wait()
        return [str(pid) for pid in remaining]

    def wait_for_event(self, timeout: float) -> None:
        self.monitor.wait_for_event(timeout)

    def find_launcher_log(self, rank: int | None) -> Path | None:
        return None
