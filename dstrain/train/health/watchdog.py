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

from dstrain.distributed.collective_log import COLLECTIVE_LOG, find_connection_error
from dstrain.distributed.world import World
from dstrain.errors import PeerFailureError, one_line
from dstrain.report.run_log import RunLog, format_current_time
from dstrain.train.health.rank_status import STATUS_TIMEOUT_SECONDS, RankStatusBoard, unknown_peer_message
from dstrain.train.health.signals import StoppedBySignal

STALL_FRACTION = 0.8
"""Of the groups' timeout, after which a run in which nothing moves is reported."""
RESTART_HINT = "fix the cause and start again: the run goes on from its newest whole checkpoint"


class Watchdog:
    """Within `with`, roll calls are answered; and while `LEDGER.doing` says that something is under way, it is watched."""

    def __init__(self, status_board: RankStatusBoard, run_dir: Path, timeout: timedelta) -> None:
        self._status_board, self._run_dir, self._timeout = status_board, run_dir, timeout.total_seconds()
        self._max_idle_seconds = STALL_FRACTION * self._timeout
        self._poll_seconds = min(1.0, self._timeout / 20)
        self._has_reported = False
        self._seconds_to_rearm = 0.0
        self._stacks_file: IO[str] | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._poll_until_stopped, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._stacks_file = _open_stacks_file(self._run_dir, self._status_board.rank)
        self._reset_faulthandler()
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self._stop_event.set()
        self._thread.join(self._poll_seconds)  # it may hang in a file system: it must not keep this one
        faulthandler.cancel_dump_traceback_later()
        if self._stacks_file is not None and not self._thread.is_alive():
            self._stacks_file.close()
            with contextlib.suppress(OSError):
                _remove_if_empty(stacks_path(self._run_dir, self._status_board.rank))

    def _poll_until_stopped(self) -> None:
        while not self._stop_event.wait(self._poll_seconds):
            with contextlib.suppress(Exception):  # a full disk, say: it only reports, and must not end
                self._check_progress()

    def _check_progress(self) -> None:
        quiet = COLLECTIVE_LOG.idle_seconds()
        self._reset_faulthandler()
        if quiet > 2 * self._poll_seconds:
            self._status_board.answer_request()
        if not COLLECTIVE_LOG.phase or quiet < self._max_idle_seconds:
            self._has_reported = False
        elif not self._has_reported:
            self._has_reported = True
            self._report_idle(quiet)

    def _reset_faulthandler(self) -> None:
        """Arm the C thread anew. It costs a thread, so not at every tick."""
        self._seconds_to_rearm -= self._poll_seconds
        if self._seconds_to_rearm <= 0 and self._stacks_file is not None:
            self._seconds_to_rearm = self._max_idle_seconds / 10
            faulthandler.dump_traceback_later(self._timeout, file=self._stacks_file)

    def _report_idle(self, idle_seconds: float) -> None:
        """This rank's stacks; and from the lowest rank that answers, one line and one event for all."""
        doing, step = COLLECTIVE_LOG.phase, COLLECTIVE_LOG.step
        if self._stacks_file is not None:
            with contextlib.suppress(OSError):
                self._stacks_file.write(
                    f"\n{format_current_time()} {doing}: nothing moved for {idle_seconds:.0f} s; {_format_last_collectives()}\n"
                )
                self._stacks_file.flush()
                faulthandler.dump_traceback(self._stacks_file, all_threads=True)
        verdict = self._status_board.request_diagnosis("", timeout=min(STATUS_TIMEOUT_SECONDS, 4 * self._poll_seconds))
        if (
            not self._status_board.is_lowest_alive(verdict.ranks)
            or self._stop_event.is_set()
            or COLLECTIVE_LOG.idle_seconds() < self._max_idle_seconds
        ):
            return
        ends = f"it ends after {self._timeout:.0f} s (timeout_minutes)"
        with contextlib.suppress(OSError, ValueError):
            print(f"stalled: {doing}: {verdict.message}; {ends}", flush=True)
        # Rank 0 writes it otherwise; of that nothing is heard, or it is this one.
        journal = RunLog(self._run_dir, rank=0)
        about = {
            "step": step,
            "doing": doing,
            "seconds": round(idle_seconds, 1),
            "ranks": verdict.ranks,
            "what": verdict.message,
        }
        journal.log_event("stalled", **about)
        journal.close()


def stacks_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / "stacks" / f"rank-{rank:05d}.txt"


def _open_stacks_file(run_dir: Path, rank: int) -> IO[str] | None:
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


def _format_last_collectives() -> str:
    """`all_reduce no. 45 of group 1 (in it)`."""
    lines = [(name, line) for name, line in COLLECTIVE_LOG.snapshot().items() if line["entered"]]
    told = (
        f"{line['names'][-1]} no. {line['entered']} of group {name}" + " (in it)" * (line["entered"] > line["left"])
        for name, line in lines
    )
    return "last collectives: " + (", ".join(told) or "none")


@contextlib.contextmanager
def peer_watchdog(
    run_dir: Path | None, world: World, timeout: timedelta, phase: str = "starting", fix: str = RESTART_HINT
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
        roll = RankStatusBoard(run_dir, world)
        with Watchdog(roll, run_dir, timeout):
            yield
        roll.sign_off("done")
    except StoppedBySignal as stop:
        if roll is not None:
            roll.sign_off("stopped", stop.signal_name)
        raise
    except Exception as error:
        why = find_connection_error(error)
        if why is None:
            if roll is not None:
                roll.sign_off("failed", one_line(f"{type(error).__name__}: {error}")[:500])
            raise
        known = (
            error
            if isinstance(error, PeerFailureError)
            else PeerFailureError(COLLECTIVE_LOG.phase or phase, unknown_peer_message(why), fix)
        )
        if run_dir is None or roll is None:
            raise known from error
        _log_error(error, known.phase, roll.rank, run_dir)
        verdict = roll.request_diagnosis(why)
        if verdict.stop_signal:
            raise StoppedBySignal(verdict.stop_signal) from error
        raise PeerFailureError(known.phase, verdict.message, known.fix) from error
    finally:
        COLLECTIVE_LOG.record_progress("")


def _log_error(error: Exception, phase: str, rank: int, run_dir: Path) -> None:
    """Put what torch said into the log, and where it came from to the stacks."""
    cause = error.__cause__ or error if isinstance(error, PeerFailureError) else error
    with contextlib.suppress(OSError):
        print(f"rank {rank}: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
        if (stacks := _open_stacks_file(run_dir, rank)) is not None:
            stacks.write(f"\n{format_current_time()} {phase}: the error came from here; {_format_last_collectives()}\n")
            traceback.print_exception(cause, file=stacks)
            stacks.close()
