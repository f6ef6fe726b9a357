"""Run a launcher so that its workers get our signals, nothing outlives it, and the exit code tells the truth.

DeepSpeed's launcher alone leaves the workers running when it gets SIGTERM, gives them 30 s where it
does pass it on, and exits 0 when its inner process is killed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dstrain.launch.exit_code import DONE, FAILED, STOPPED, USAGE, Outcome, outcome
from dstrain.launch.job import Crew
from dstrain.launch.multihost.heartbeat import print_error
from dstrain.launch.worker import SAME_SECONDS, adopt_orphans, close_output, log_path

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""To a worker each of them means: write a checkpoint and stop."""
SETTLE_SECONDS = 0.5
"""What is left gets this long to end by itself once the launcher is gone."""
STOP_SECONDS = 300.0
"""Workers get this long for their checkpoint where the launcher died of the signal that asked for it."""
OTHERS_SECONDS = 8.0
"""Once a rank has failed the others get this long to say why they cannot go on; DeepSpeed's launcher gives them 30."""
KILLED_SECONDS = 2.0
"""The same where it was killed: they could only say that it is gone."""
_TICK_SECONDS = 0.05


class Watch:
    """What a launch was asked to do, and when."""

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        """The workers write a checkpoint when they are asked to stop; others are ended at the first signal."""
        self.asked_at: float | None = None
        """When a signal was first passed on."""
        self.told_at: float | None = None
        """When SIGTERM or SIGINT first was: the next one ends everything."""
        self.failed_at: float | None = None
        """When a rank was first seen to have ended badly."""
        self.killed = False
        """Ended at once, as someone asked."""


def supervise(crew: Crew, watch: Watch | None = None) -> int:
    """Run a launch to its end. Returns the exit code for the shell. What was asked of it is left in `watch`.

    0 done, 2 bad usage, 75 stopped after a checkpoint, 1 everything else. Output goes where ours goes.
    Call it from the main thread.
    """
    watch = watch or Watch()
    with _caught_signals() as signals, _adopted_orphans():
        try:
            crew.start()
            _wait(watch, crew, signals)
        finally:
            # Of what ended by itself; the rest is about to be ended by us.
            launcher, ends, lost = crew.over(), dict(crew.ends), crew.lost
            stubborn = crew.end()
    crew.look(again=True)
    close_output()
    if stubborn:
        _say(f"these processes could not be ended: {', '.join(stubborn)}")
    result = outcome(
        crew.records, ends if watch.failed_at else crew.ends, FAILED if launcher is None else launcher, crew.ranks
    )
    if lost and result.code not in (DONE, STOPPED):
        _say(crew.lost)  # with what became of those that were given up
        return FAILED
    return _report(watch, crew, result)


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


def _wait(watch: Watch, crew: Crew, signals: deque[int]) -> None:
    """Until the launcher is gone, and, where workers were asked to stop, until those are gone too."""
    gone_at: float | None = None
    while not watch.killed:
        crew.look()
        while signals:
            _pass_on(signals.popleft(), watch, crew)
        if crew.lost or _others_had_time(watch, crew):
            return
        if crew.over() is not None:
            gone_at = gone_at or time.monotonic()
            waited = time.monotonic() - gone_at
            saving = watch.asked_at is not None and waited < STOP_SECONDS and crew.alive
            if not crew.left() or (waited > SETTLE_SECONDS and not saving):
                return
        crew.rest(_TICK_SECONDS)


def _others_had_time(watch: Watch, crew: Crew) -> bool:
    """Whether a rank failed so long ago that the others will not end by themselves."""
    bad = {rank for rank, status in crew.ends.items() if status != 0}
    if not bad:
        return False
    codes = {rank: record.exit for rank, record in crew.records.items() if rank in bad}
    bad -= {rank for rank, code in codes.items() if code in (DONE, STOPPED)}  # it died while Python shut down
    watch.failed_at = (watch.failed_at or time.monotonic()) if bad else None
    patience = KILLED_SECONDS if any(codes.get(rank) is None for rank in bad) else OTHERS_SECONDS
    return watch.failed_at is not None and time.monotonic() - watch.failed_at > patience


def _pass_on(number: int, watch: Watch, crew: Crew) -> None:
    """Give the signal to the workers; a second SIGTERM or SIGINT ends everything. Waits for no reader (`| less`, Ctrl-S)."""
    name = signal.Signals(number).name
    if not watch.saves:
        watch.killed = True
        return
    if number in (signal.SIGTERM, signal.SIGINT):
        if watch.told_at is not None:
            watch.killed = time.monotonic() - watch.told_at > SAME_SECONDS
            return
        watch.told_at = time.monotonic()
    reached = crew.signal(number)
    if not reached:
        watch.killed = True
        print_error(f"dstrain: {name}: no worker has started yet, so there is nothing to save")
        return
    watch.asked_at = watch.asked_at or time.monotonic()
    print_error(
        f"dstrain: {name}: asked {reached} worker(s) to write a checkpoint and stop; a second SIGTERM or Ctrl-C ends them at once"
    )


def _report(watch: Watch, crew: Crew, result: Outcome) -> int:
    """Say what went wrong, after the last lines of the rank to blame. Returns the exit code."""
    if watch.killed and result.code == FAILED:
        _say("ended at once, as asked" + ("; what was not in a checkpoint is lost" if watch.asked_at else ""))
        return result.code
    if not result.message:
        return result.code
    if watch.asked_at is not None and not crew.records:
        _say("the signal came before a worker had begun, so there was nothing to save")
        return result.code
    record = None if result.rank is None else crew.records.get(result.rank)
    told_already = result.rank == 0 and record is not None and record.exit is not None  # rank 0 has the terminal
    own = None if result.rank is None else log_path(crew.run_dir, result.rank)
    if not (told_already or _show_tail(own)):
        _show_tail(crew.log_of(result.rank))
    if not (told_already and result.code == USAGE):  # its error is the last line there
        _say(result.message)
    return result.code


def _show_tail(path: Path | None, lines: int = 20) -> bool:
    """Whether there was something to show."""
    if path is None:
        return False
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            tail = log.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return False
    if tail:
        _say("\n".join([f"the end of {path}:", *(f"  | {line}" for line in tail)]))
    return bool(tail)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"dstrain: {text}", file=sys.stderr, flush=True)
