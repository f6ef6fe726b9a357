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

from dstrain.launch.processes import descendants, end_all, workers
from dstrain.launch.rank_monitor import Ranks
from dstrain.launch.worker import LAUNCH_ID, SUPERVISOR, Record, die_with_parent, forget_records, read_records


class Crew(Protocol):
    """A launcher and its ranks, on this machine or on many."""

    run_dir: Path

    @property
    def ranks(self) -> Collection[int]:
        """Those whose records tell how the launch ended."""

    @property
    def alive(self) -> Collection[int]:
        """Ranks that said they started and have not ended."""

    @property
    def ends(self) -> Mapping[int, int | None]:
        """How ranks ended, in the order seen."""

    @property
    def records(self) -> Mapping[int, Record]:
        """What the ranks said of themselves."""

    lost: str
    """Why the launch cannot go on, whatever its ranks do: a host that went silent. Empty where it can."""

    def start(self) -> None:
        """Start everything."""

    def look(self, again: bool = False) -> None:
        """Note what happened since."""

    def over(self) -> int | None:
        """The launcher's return code, once it is gone."""

    def signal(self, number: int) -> int:
        """Give the signal to the ranks; how many were reached."""

    def left(self) -> bool:
        """Whether anything of the launch still lives."""

    def end(self) -> list[str]:
        """SIGKILL what is left. Returns what would not end."""

    def rest(self, seconds: float) -> None:
        """Sleep, but wake when something happens."""

    def log_of(self, rank: int | None) -> Path | None:
        """What the launcher wrote that started a rank, where that did not go to the terminal."""


@dataclass(frozen=True)
class Program:
    """A launcher to run."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str | None = None
    output: IO[bytes] | None = None
    """Where it writes, and without input; None: where this process does."""


class LocalCrew:
    """A launcher as our child and whatever is below it."""

    def __init__(self, program: Program, run_dir: Path, ranks: Collection[int]) -> None:
        self.run_dir, self.ranks, self.lost = run_dir, ranks, ""
        self._program = program
        self._launch = program.environment.get(LAUNCH_ID, "")
        self.seen = Ranks(run_dir, ranks, self._launch)
        self._strangers: set[int] = set()
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> Mapping[int, int]:
        return self.seen.alive

    @property
    def ends(self) -> Mapping[int, int | None]:
        return self.seen.ends

    @property
    def records(self) -> Mapping[int, Record]:
        return {rank: record for rank, record in read_records(self.run_dir, self._launch).items() if rank in self.ranks}

    def start(self) -> None:
        if not self._launch:  # else records carry its name
            forget_records(self.run_dir, self.ranks)
        self._strangers = {child.pid for child in psutil.Process().children()}
        program = self._program
        self._launcher = subprocess.Popen(
            list(program.argv),
            env={**program.environment, SUPERVISOR: f"{socket.gethostname()} {psutil.Process().pid}"},
            cwd=program.cwd,
            stdin=None if program.output is None else subprocess.DEVNULL,
            stdout=program.output,
            stderr=program.output and subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def look(self, again: bool = False) -> None:
        self.seen.look(again)

    def over(self) -> int | None:
        return None if self._launcher is None else self._launcher.poll()

    def signal(self, number: int) -> int:
        """To the workers, not to the launchers between: those would not wait for a checkpoint."""
        reached = workers(descendants(self._strangers))
        for worker in reached:
            with contextlib.suppress(psutil.Error):
                worker.send_signal(number)
        return len(reached)

    def left(self) -> bool:
        return bool(descendants(self._strangers))

    def end(self) -> list[str]:
        if self._launcher is None:
            return []
        stubborn = end_all(self._strangers, self._launcher.pid)
        if self._launcher.pid not in stubborn:
            self._launcher.wait()
        return [str(pid) for pid in stubborn]

    def rest(self, seconds: float) -> None:
        self.seen.rest(seconds)

    def log_of(self, rank: int | None) -> Path | None:
        return None
