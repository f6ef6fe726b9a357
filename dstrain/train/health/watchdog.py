"""A thread on each rank that answers roll calls, and reports a run in which nothing moves. It ends nothing.

Two watches, since each is blind where the other sees. A Python thread knows what was progress, can ask the other
ranks and write a sentence, but does not run while a call into C keeps the interpreter's lock. The C thread of
`faulthandler` needs no lock, but knows a deadline only and can write stacks only. So the Python thread puts the C
thread's deadline off for as long as it runs itself: that one fires only where nothing in Python runs any more.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from dstrain.distributed.collective_log import LEDGER, lost
from dstrain.distributed.world import World
from dstrain.errors import LostError, one_line
from dstrain.report.run_log import Journal, now
from dstrain.train.health.rank_status import PATIENCE_SECONDS, RollCall, unnamed
from dstrain.train.health.signals import Interrupted

SHARE = 0.8
"""Of the groups' timeout, after which a run in which nothing moves is reported."""
MEND = "fix the cause and start again: the run goes on from its newest whole checkpoint"


class Watchdog:
    """Within `with`, roll calls are answered; and while `LEDGER.doing` says that something is under way, it is watched."""

    def __init__(self, roll: RollCall, run_dir: Path, timeout: timedelta) -> None:
        self._roll, self._run_dir, self._timeout = roll, run_dir, timeout.total_seconds()
        self._limit = SHARE * self._timeout
        self._tick = min(1.0, self._timeout / 20)
        self._told = False
        self._deadline = 0.0
        self._stacks: IO[str] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._stacks = _opened(self._run_dir, self._roll.rank)
        self._put_off()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(self._tick)  # it may hang in a file system: it must not keep this one
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is not None and not self._thread.is_alive():
            self._stacks.close()
            with contextlib.suppress(OSError):
                _remove_if_empty(stacks_path(self._run_dir, self._roll.rank))

    def _watch(self) -> None:
        while not self._end.wait(self._tick):
            with contextlib.suppress(Exception):  # a full disk, say: it only reports, and must not end
                self._look()

    def _look(self) -> None:
        quiet = LEDGER.quiet()
        self._put_off()
        if quiet > 2 * self._tick:
            self._roll.answer()
        if not LEDGER.doing or quiet < self._limit:
            self._told = False
        elif not self._told:
            self._told = True
            self._report(quiet)

    def _put_off(self) -> None:
        """Arm the C thread anew. It costs a thread, so not at every tick."""
        self._deadline -= self._tick
        if self._deadline <= 0 and self._stacks is not None:
            self._deadline = self._limit / 10
            faulthandler.dump_traceback_later(self._timeout, file=self._stacks)

    def _report(self, quiet: float) -> None:
        """This rank's stacks; and from the lowest rank that answers, one line and one event for all."""
        doing, step = LEDGER.doing, LEDGER.step
        if self._stacks is not None:
            with contextlib.suppress(OSError):
                self._stacks.write(f"\n{now()} {doing}: nothing moved for {quiet:.0f} s; {_last_collectives()}\n")
                self._stacks.flush()
                faulthandler.dump_traceback(self._stacks, all_threads=True)
        verdict = self._roll.name("", patience=min(PATIENCE_SECONDS, 4 * self._tick))
        if not self._roll.lowest(verdict.ranks) or self._end.is_set() or LEDGER.quiet() < self._limit:
            return
        ends = f"it ends after {self._timeout:.0f} s (timeout_minutes)"
        with contextlib.suppress(OSError, ValueError):
            print(f"stalled: {doing}: {verdict.what}; {ends}", flush=True)
        # Rank 0 writes it otherwise; of that nothing is heard, or it is this one.
        journal = Journal(self._run_dir, rank=0)
        about = {"step": step, "doing": doing, "seconds": round(quiet, 1), "ranks": verdict.ranks, "what": verdict.what}
        journal.event("stalled", **about)
        journal.close()


def stacks_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / "stacks" / f"rank-{rank:05d}.txt"


def _opened(run_dir: Path, rank: int) -> IO[str] | None:
    """The file for stacks, open before anything goes wrong."""
    path = stacks_path(run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError:
        return None


def _remove_if_empty(path: Path) -> None:
    if not path.stat().st_size:
        path.unlink()
        path.parent.rmdir()  # raises where the others' are


def _last_collectives() -> str:
    """`all_reduce no. 45 of group 1 (in it)`."""
    lines = [(name, line) for name, line in LEDGER.told().items() if line["entered"]]
    told = (
        f"{line['names'][-1]} no. {line['entered']} of group {name}" + " (in it)" * (line["entered"] > line["left"])
        for name, line in lines
    )
    return "last collectives: " + (", ".join(told) or "none")


@contextlib.contextmanager
def watched(
    run_dir: Path | None, world: World, timeout: timedelta, doing: str = "starting", mend: str = MEND
) -> Iterator[None]:
    """Inside, the processes of this launch look after each other: where one ends or falls silent, the others name it.

    What torch raises then becomes a LostError, or Interrupted where the other was stopped by a signal before the first
    step. `run_dir` is shared by all; without one nobody can be named. `doing`: where `LEDGER` does not say. Collective.
    """
    roll = None
    try:
        if run_dir is None:
            yield
            return
        roll = RollCall(run_dir, world)
        with Watchdog(roll, run_dir, timeout):
            yield
        roll.leave("done")
    except Interrupted as stop:
        if roll is not None:
            roll.leave("stopped", stop.signal)
        raise
    except Exception as error:
        why = lost(error)
        if why is None:
            if roll is not None:
                roll.leave("failed", one_line(f"{type(error).__name__}: {error}")[:500])
            raise
        known = error if isinstance(error, LostError) else LostError(LEDGER.doing or doing, unnamed(why), mend)
        if run_dir is None or roll is None:
            raise known from error
        _keep(error, known.doing, roll.rank, run_dir)
        verdict = roll.name(why)
        if verdict.stopped:
            raise Interrupted(verdict.stopped) from error
        raise LostError(known.doing, verdict.what, known.mend) from error
    finally:
        LEDGER.mark("")


def _keep(error: Exception, doing: str, rank: int, run_dir: Path) -> None:
    """Put what torch said into the log, and where it came from to the stacks."""
    cause = error.__cause__ or error if isinstance(error, LostError) else error
    with contextlib.suppress(OSError):
        print(f"rank {rank}: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
        if (stacks := _opened(run_dir, rank)) is not None:
            stacks.write(f"\n{now()} {doing}: the error came from here; {_last_collectives()}\n")
            traceback.print_exception(cause, file=stacks)
            stacks.close()
