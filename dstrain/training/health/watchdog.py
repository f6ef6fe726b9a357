"""Watchdog thread of each rank: it reports a stalled run; and the error of a rank that lost another one."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from dstrain.distributed.collective_log import CollectiveLog
from dstrain.distributed.store import find_connection_error
from dstrain.distributed.world import World
from dstrain.errors import OutOfMemoryError, PeerFailureError, one_line
from dstrain.files import open_for_writing
from dstrain.launch.worker import leave_error_to_supervisor
from dstrain.process_setup import log_stderr, log_stdout
from dstrain.report.run_log import RunLog, format_current_time
from dstrain.training.health.diagnosis import Failure
from dstrain.training.health.liveness import STATUS_TIMEOUT_SECONDS, Liveness
from dstrain.training.health.signals import StoppedBySignal

STALL_FRACTION = 0.8
"""Share of the process groups' timeout after which a run without progress is reported."""
RESTART_HINT = "fix the cause and start again: the run resumes from its latest complete checkpoint"


class Watchdog:
    """Context manager that watches the phase named by `liveness.collectives.phase`.

    Two timers: a Python thread can ask other ranks but is blocked while C code holds the GIL; faulthandler's C timer is
    not, but can only dump stacks. The Python thread postpones the C timer while it runs, so that the C timer fires only
    if no Python code runs any more.
    """

    def __init__(self, liveness: Liveness, run_dir: Path, timeout: timedelta) -> None:
        self._liveness, self._run_dir, self._timeout = liveness, run_dir, timeout.total_seconds()
        self._max_idle_seconds = STALL_FRACTION * self._timeout
        self._poll_seconds = min(1.0, self._timeout / 20)
        self._has_reported = False
        self._seconds_to_rearm = 0.0
        self._stacks_file: IO[str] | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._poll_until_stopped, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._stacks_file = open_stacks_file(self._run_dir, self._liveness.rank)
        self._reset_faulthandler()
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self._stop_event.set()
        self._thread.join(self._poll_seconds)  # bounded: it may hang in a file system
        # Before the file is closed, into which the C timer would write.
        faulthandler.cancel_dump_traceback_later()
        if self._stacks_file is not None and not self._thread.is_alive():
            self._stacks_file.close()
            with contextlib.suppress(OSError):
                _remove_if_empty(stacks_path(self._run_dir, self._liveness.rank))

    def _poll_until_stopped(self) -> None:
        while not self._stop_event.wait(self._poll_seconds):
            with contextlib.suppress(Exception):  # such as a full disk: reporting must not end the thread
                self._check_progress()

    def _check_progress(self) -> None:
        log = self._liveness.collectives
        idle = log.idle_seconds()
        self._reset_faulthandler()
        if not log.phase or idle < self._max_idle_seconds:
            self._has_reported = False
        elif not self._has_reported:
            self._has_reported = True
            self._report_idle(idle)

    def _reset_faulthandler(self) -> None:
        """Postpone the C timer. Each call starts a C thread, so not at every poll."""
        self._seconds_to_rearm -= self._poll_seconds
        if self._seconds_to_rearm <= 0 and self._stacks_file is not None:
            self._seconds_to_rearm = self._max_idle_seconds / 10
            faulthandler.dump_traceback_later(self._timeout, file=self._stacks_file)

    def _report_idle(self, idle_seconds: float) -> None:
        """Write this rank's stacks; the rank that reports for all also prints a line and logs an event."""
        log = self._liveness.collectives
        doing, step = log.phase, log.step
        if self._stacks_file is not None:
            with contextlib.suppress(OSError):
                self._stacks_file.write(
                    f"\n{format_current_time()} {doing}: nothing moved for {idle_seconds:.0f} s; {_format_last_collectives(log)}\n"
                )
                self._stacks_file.flush()
                faulthandler.dump_traceback(self._stacks_file, all_threads=True)
        diagnosis = self._liveness.diagnose_stall(min(STATUS_TIMEOUT_SECONDS, 4 * self._poll_seconds))
        if diagnosis is None or self._stop_event.is_set() or log.idle_seconds() < self._max_idle_seconds:
            return
        ends = f"it ends after {self._timeout:.0f} s (timeout_minutes)"
        with contextlib.suppress(OSError, ValueError):
            log_stdout(f"stalled: {doing}: {diagnosis.error}; {ends}\n{diagnosis.table}")
        # Rank 0 writes events.jsonl otherwise; here it does not answer, or it is this rank.
        journal = RunLog(self._run_dir, rank=0, repairs=False)
        about = {
            "step": step,
            "doing": doing,
            "seconds": round(idle_seconds, 1),
            "ranks": diagnosis.ranks,
            "what": diagnosis.error,
        }
        journal.log_event("stalled", **about)
        journal.close()


def stacks_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / "stacks" / f"rank-{rank:05d}.txt"


def open_stacks_file(run_dir: Path, rank: int) -> IO[str] | None:
    """Open the file for stacks, before a failure could prevent it; None if that fails."""
    try:
        return io.TextIOWrapper(io.BufferedWriter(open_for_writing(stacks_path(run_dir, rank), append=True)), "utf-8")
    except OSError:
        return None


def _remove_if_empty(path: Path) -> None:
    if not path.stat().st_size:
        path.unlink()
        path.parent.rmdir()  # raises if it holds files of other ranks


def _format_last_collectives(log: CollectiveLog) -> str:
    """Return `last collectives: all_reduce no. 45 of group 1 (in it)`."""
    lines = [(name, line) for name, line in log.snapshot().items() if line["entered"]]
    entries = (
        f"{line['names'][-1]} no. {line['entered']} of group {name}" + " (in it)" * (line["entered"] > line["left"])
        for name, line in lines
    )
    return "last collectives: " + (", ".join(entries) or "none")


@contextlib.contextmanager
def peer_watchdog(
    liveness: Liveness,
    run_dir: Path | None,
    world: World,
    timeout: timedelta,
    phase: str = "starting",
    fix: str = RESTART_HINT,
) -> Iterator[None]:
    """Replace torch's connection errors inside by a PeerFailureError that names the failed rank.

    Raises StoppedBySignal instead if a signal stopped the other rank before the first step. `run_dir` is for the stacks
    of a stalled run; with None there is no watchdog. `phase` is used while `world.log.phase` is empty; `fix` is the
    last part of the message. Ends the heartbeats. Collective.
    """
    liveness.collectives = world.log
    try:
        with Watchdog(liveness, run_dir, timeout) if run_dir else contextlib.nullcontext():
            yield
        liveness.finish()
        # The store ends with rank 0: no rank may use it any more by then.
        with contextlib.suppress(RuntimeError):
            world.barrier()
    except StoppedBySignal as stop:
        liveness.report_failure(Failure(rank=world.rank, error=str(stop), stop_signal=stop.signal_name))
        raise
    except Exception as error:
        reason = find_connection_error(error)
        if reason is None:
            error_line = f"{_summarize(error)}; see logs/rank-{world.rank:05d}.log"
            liveness.report_failure(Failure(rank=world.rank, error=error_line))
            raise
        leave_error_to_supervisor(world.rank)
        known = error if isinstance(error, PeerFailureError) else None
        phase = known.phase if known else world.log.phase or phase
        _log_error(error, phase, liveness, run_dir)
        failure = liveness.diagnose_failure(reason)
        if failure.table:
            with contextlib.suppress(OSError, ValueError):  # a full disk or a closed stream
                log_stderr(failure.table)
        raise liveness.to_exception(failure, phase, known.fix if known else fix) from error
    finally:
        liveness.close()
        # Without a phase nothing is reported as stalled.
        world.log.record_progress("")


def _summarize(error: Exception) -> str:
    """Return the error for other ranks; not the long message of a failed allocation, which this rank prints."""
    return (
        "out of memory" if isinstance(error, OutOfMemoryError) else one_line(f"{type(error).__name__}: {error}")[:500]
    )


def _log_error(error: Exception, phase: str, liveness: Liveness, run_dir: Path | None) -> None:
    """Print torch's message, and append its traceback to the stacks file."""
    cause = error.__cause__ or error if isinstance(error, PeerFailureError) else error
    with contextlib.suppress(OSError):
        log_stderr(f"rank {liveness.rank}: {type(cause).__name__}: {cause}")
        stacks = open_stacks_file(run_dir, liveness.rank) if run_dir else None
        if stacks is not None:
            last = _format_last_collectives(liveness.collectives)
            stacks.write(f"\n{format_current_time()} {phase}: the error came from here; {last}\n")
            traceback.print_exception(cause, file=stacks)
            stacks.close()
