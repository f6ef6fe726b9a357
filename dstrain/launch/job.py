"""The processes of a launch, and what can be done with them: start, look, signal, end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

from dstrain.launch.processes import descendants, find_workers, kill_descendants
from dstrain.launch.rank_monitor import RankMonitor
from dstrain.launch.worker import (
    LAUNCH_ID_ENV,
    SUPERVISOR_ENV,
    RankRecord,
    read_rank_records,
    remove_rank_records,
    set_parent_death_signal,
)


class LaunchedJob(Protocol):
    """A launcher and its ranks, on this machine or on many."""

    run_dir: Path

    @property
    def ranks(self) -> Collection[int]:
        """Those whose records tell how the launch ended."""

    @property
    def alive_ranks(self) -> Collection[int]:
        """Ranks that said they started and have not ended."""

    @property
    def exit_codes(self) -> Mapping[int, int | None]:
        """How ranks ended, in the order seen."""

    @property
    def records(self) -> Mapping[int, RankRecord]:
        """What the ranks said of themselves."""

    abort_reason: str
    """Why the launch cannot go on, whatever its ranks do: a host that went silent. Empty where it can."""

    def start(self) -> None:
        """Start everything."""

    def poll(self, force: bool = False) -> None:
        """Note what happened since."""

    def poll_launcher(self) -> int | None:
        """The launcher's return code, once it is gone."""

    def send_signal(self, signum: int) -> int:
        """Give the signal to the ranks; how many were reached."""

    def is_alive(self) -> bool:
        """Whether anything of the launch still lives."""

    def kill(self) -> list[str]:
        """SIGKILL what is left. Returns what would not end."""

    def wait_for_event(self, timeout: float) -> None:
        """Sleep, but wake when something happens."""

    def find_launcher_log(self, rank: int | None) -> Path | None:
        """What the launcher wrote that started a rank, where that did not go to the terminal."""


@dataclass(frozen=True)
class LauncherSpec:
    """A launcher to run."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None = None
    stdout: IO[bytes] | None = None
    """Where it writes, and without input; None: where this process does."""


class LocalJob:
    """A launcher as our child and whatever is below it."""

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
    def records(self) -> Mapping[int, RankRecord]:
        return {
            rank: record
            for rank, record in read_rank_records(self.run_dir, self._launch_id).items()
            if rank in self.ranks
        }

    def start(self) -> None:
        if not self._launch_id:  # else records carry its name
            remove_rank_records(self.run_dir, self.ranks)
        self._excluded_pids = {child.pid for child in psutil.Process().children()}
        program = self._spec
        self._launcher = subprocess.Popen(
            list(program.argv),
            env={**program.environment, SUPERVISOR_ENV: f"{socket.gethostname()} {psutil.Process().pid}"},
            cwd=program.cwd,
            stdin=None if program.stdout is None else subprocess.DEVNULL,
            stdout=program.stdout,
            stderr=program.stdout and subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=set_parent_death_signal,
        )

    def poll(self, force: bool = False) -> None:
        self.monitor.poll(force)

    def poll_launcher(self) -> int | None:
        return None if self._launcher is None else self._launcher.poll()

    def send_signal(self, signum: int) -> int:
        """To the workers, not to the launchers between: those would not wait for a checkpoint."""
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
        stubborn = kill_descendants(self._excluded_pids, self._launcher.pid)
        if self._launcher.pid not in stubborn:
            self._launcher.wait()
        return [str(pid) for pid in stubborn]

    def wait_for_event(self, timeout: float) -> None:
        self.monitor.wait_for_event(timeout)

    def find_launcher_log(self, rank: int | None) -> Path | None:
        return None
