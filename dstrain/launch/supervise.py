"""Run a launcher so that its workers get our signals, nothing outlives it, and the exit code tells the truth.

DeepSpeed's launcher alone leaves the workers running when it gets SIGTERM, gives them 30 s where it
does pass it on, and exits 0 when its inner process is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from dstrain.launch.outcome import FAILED, Outcome, outcome
from dstrain.launch.processes import descendants, end_all, exit_status, process_state, workers
from dstrain.launch.worker import SUPERVISOR, adopt_orphans, die_with_parent, log_path, read_records, record_folder

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""To a worker each of them means: write a checkpoint and stop."""
SECOND_AFTER_SECONDS = 0.5
"""Sooner it is the same signal again: `timeout` and batch systems send it to the process and to its group."""
SETTLE_SECONDS = 0.5
"""What is left gets this long to end by itself once the launcher is gone."""
STOP_SECONDS = 300.0
"""Workers get this long for their checkpoint where the launcher died of the signal that asked for it."""
_TICK_SECONDS = 0.05
_READ_SECONDS = 0.1


class Watch:
    """What was seen of one launch while it ran."""

    def __init__(self, run_dir: Path, processes: int, saves: bool = True) -> None:
        self.run_dir, self.processes, self.saves = run_dir, processes, saves
        """`saves`: the workers write a checkpoint when they are asked to stop; others are ended at the first signal."""
        self.asked_at: float | None = None
        """When a signal was first passed on."""
        self.told_at: float | None = None
        """When SIGTERM or SIGINT first was: the next one ends everything."""
        self.killed = False
        self.ends: dict[int, int | None] = {}
        """How each rank's process ended, in the order seen: as subprocess tells it, None where it was reaped too soon."""
        self.alive: dict[int, int] = {}
        """Pid by rank."""
        self._descriptors: dict[int, int] = {}
        self._read_at = float("-inf")

    def look(self, again: bool = False) -> None:
        """Note which ranks started, until all have, and which ended. The first to end is the one to blame."""
        missing = len(self.alive) + len(self.ends) < self.processes
        if again or (missing and time.monotonic() - self._read_at > _READ_SECONDS):
            self._read_at = time.monotonic()
            for rank, record in read_records(self.run_dir).items():
                if rank not in self.ends and rank not in self.alive:
                    self.alive[rank] = record.pid
                    with contextlib.suppress(OSError, AttributeError):  # gone already, or a kernel without it
                        self._descriptors[rank] = os.pidfd_open(record.pid)
        ended: dict[int, int | None] = {}
        for rank, pid in self.alive.items():
            state = process_state(pid)
            if state in ("gone", "Z"):
                ended[rank] = exit_status(pid) if state == "Z" else None
        # Of those seen at once a killed one goes first: the others lost their connection to it.
        for rank in sorted(ended, key=lambda rank: (ended[rank] or 0) >= 0):
            self.ends[rank] = ended[rank]
            del self.alive[rank]
            if rank in self._descriptors:
                os.close(self._descriptors.pop(rank))

    def rest(self, seconds: float) -> None:
        """Sleep, but wake when a rank ends: its parent may reap it within milliseconds, and its status is lost then."""
        poll = select.poll()
        for descriptor in self._descriptors.values():
            poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * seconds)


def supervise(argv: Sequence[str], env: Mapping[str, str], run_dir: Path, processes: int = 1) -> int:
    """Run the launcher `argv`, which starts `processes` workers, to its end. Returns the exit code for the shell.

    0 done, 2 bad usage, 75 stopped after a checkpoint, 1 everything else. Output goes where ours goes.
    Call it from the main thread.
    """
    return supervise_seen(argv, env, Watch(run_dir, processes))


def supervise_seen(argv: Sequence[str], env: Mapping[str, str], watch: Watch) -> int:
    """The same, with what was seen of the launch left in `watch`."""
    folder = record_folder(watch.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    with _caught_signals() as signals, _adopted_orphans():
        strangers = {child.pid for child in psutil.Process().children()}
        launcher = subprocess.Popen(
            list(argv),
            env={**env, SUPERVISOR: f"{socket.gethostname()} {os.getpid()}"},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            _wait(watch, launcher, signals, strangers)
        finally:
            stubborn = end_all(strangers, launcher.pid)
            if launcher.pid not in stubborn:
                launcher.wait()
    watch.look(again=True)
    if stubborn:
        _say(f"these processes could not be ended: {', '.join(map(str, stubborn))}")
    status = FAILED if launcher.returncode is None else launcher.returncode
    return _report(watch, outcome(read_records(watch.run_dir), watch.ends, status, watch.processes))


@contextlib.contextmanager
def _caught_signals() -> Iterator[deque[int]]:
    """Queue the signals to pass on, instead of dying of them. One that was ignored stays so, as nohup wants it."""
    queue: deque[int] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        queue.append(number)

    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _adopted_orphans() -> Iterator[None]:
    adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(False)


def _wait(watch: Watch, launcher: subprocess.Popen[bytes], signals: deque[int], strangers: set[int]) -> None:
    """Until the launcher is gone, and, where workers were asked to stop, until those are gone too."""
    gone_at: float | None = None
    while not watch.killed:
        watch.look()
        while signals:
            _pass_on(signals.popleft(), watch, strangers)
        if launcher.poll() is not None:
            gone_at = gone_at or time.monotonic()
            waited = time.monotonic() - gone_at
            left = descendants(strangers)
            saving = watch.asked_at is not None and waited < STOP_SECONDS and watch.alive
            if not left or (waited > SETTLE_SECONDS and not saving):
                return
        watch.rest(_TICK_SECONDS)


def _pass_on(number: int, watch: Watch, strangers: set[int]) -> None:
    """Give the signal to the workers, not to the launchers between: those would not wait for a checkpoint."""
    name = signal.Signals(number).name
    if not watch.saves:
        watch.killed = True
        return
    if number in (signal.SIGTERM, signal.SIGINT):
        if watch.told_at is not None:
            watch.killed = time.monotonic() - watch.told_at > SECOND_AFTER_SECONDS
            return
        watch.told_at = time.monotonic()
    reached = workers(descendants(strangers))
    if not reached:
        watch.killed = True
        _say(f"{name}: no worker has started yet, so there is nothing to save")
        return
    watch.asked_at = watch.asked_at or time.monotonic()
    for worker in reached:
        with contextlib.suppress(psutil.Error):
            worker.send_signal(number)
    _say(
        f"{name}: asked {len(reached)} worker(s) to write a checkpoint and stop; a second SIGTERM or Ctrl-C ends them at once"
    )


def _report(watch: Watch, result: Outcome) -> int:
    """Say what went wrong, after the last lines of the rank to blame. Returns the exit code."""
    if watch.killed and result.code == FAILED:
        _say("ended at once, as asked" + ("; what was not in a checkpoint is lost" if watch.saves else ""))
        return result.code
    if not result.message:
        return result.code
    told_already = False
    if result.rank is not None:
        record = read_records(watch.run_dir).get(result.rank)
        told_already = result.rank == 0 and record is not None and record.exit is not None  # rank 0 has the terminal
        if not told_already:
            _show_tail(log_path(watch.run_dir, result.rank))
    _say(result.message)
    return result.code


def _show_tail(path: Path, lines: int = 20) -> None:
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            tail = log.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return
    _say("\n".join([f"the end of {path}:", *(f"  | {line}" for line in tail)]))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"dstrain: {text}", file=sys.stderr, flush=True)
