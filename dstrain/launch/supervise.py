"""Supervision of a launched group: signal forwarding, grace periods, cleanup and exit code."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dstrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, first_names, is_debug
from dstrain.host_limits import HOST_MEMORY_FIX
from dstrain.launch.spawn import RankEnd, WorkerGroup
from dstrain.launch.worker import DUPLICATE_SIGNAL_SECONDS, RankRecord, finish_log_copy, log_path, print_error
from dstrain.process_setup import handle_signals, log_stderr, set_child_subreaper

EXIT_GRACE_SECONDS = 0.5
"""Time for children of the ranks to end by themselves after all ranks have ended."""
FAILURE_GRACE_SECONDS = 8.0
"""Time for the other ranks to report their errors after a rank has failed."""
KILLED_GRACE_SECONDS = 2.0
"""The same if it was killed, or refused its input: the others could only report that it is gone."""
_POLL_SECONDS = 0.05
_TAIL_LINES = 20


class StopState:
    """Signals and failures of a launch, with their times (time.monotonic)."""

    def __init__(self, saves_checkpoint: bool = True) -> None:
        self.saves_checkpoint = saves_checkpoint
        """True if the workers write a checkpoint when asked to stop; else the first signal kills them."""
        self.is_stopping = False
        """True once ranks were asked to save and stop."""
        self.stop_requested_at: float | None = None
        """Time of the first SIGTERM or SIGINT: the next one kills the group."""
        self.failed_at: float | None = None
        """Time at which a failed rank was first seen."""
        self.killed = False
        """True if the group was killed on request."""


def supervise(group: WorkerGroup, stop_state: StopState | None = None) -> int:
    """Run a group to its end and return the exit code for the shell.

    0 done, 2 bad usage, 75 stopped after a checkpoint, 1 everything else. Signals and failures are recorded in
    `stop_state`. Call it from the main thread.
    """
    stop_state, signals = stop_state or StopState(), deque[int]()
    with handle_signals(lambda signum, _: signals.append(signum)):
        set_child_subreaper(True)
        try:
            group.start()
            _wait_for_exit(stop_state, group, signals)
        finally:
            # Read before the kill below.
            ended_unaided, abort_reason = [*group.ends], group.abort_reason
            # Also after a success: no process of the launch may be left.
            remaining = group.kill()
            set_child_subreaper(False)
    finish_log_copy()
    if remaining:
        _log_stderr(f"these processes could not be ended: {', '.join(remaining)}")
    candidates = ended_unaided if stop_state.failed_at else [*group.ends]
    outcome = compute_outcome(group.ends, group.launch.ranks, candidates)
    if abort_reason and outcome.code not in (EXIT_DONE, EXIT_STOPPED):
        _log_stderr(abort_reason)
        return EXIT_FAILED
    return _report_outcome(stop_state, group, outcome)


def exit_without_workers(signum: int, frame: FrameType | None) -> None:
    """Handle a signal while no worker runs: exit with 1. SIGUSR1 asks for a checkpoint, and there is nothing to save."""
    if signum != signal.SIGUSR1:
        raise SystemExit(f"dstrain: {signal.Signals(signum).name}: no worker runs, so there is nothing to save")


def _wait_for_exit(stop_state: StopState, group: WorkerGroup, signals: deque[int]) -> None:
    """Wait until all ranks have ended, or those that are left have to be."""
    gone_at: float | None = None
    while not stop_state.killed:
        group.poll()
        while signals:
            _forward_signal(signals.popleft(), stop_state, group)
        if group.abort_reason or _is_failure_timeout_over(stop_state, group):
            return
        if not group.alive_ranks:
            gone_at = gone_at or time.monotonic()
            if not group.is_alive() or time.monotonic() - gone_at > EXIT_GRACE_SECONDS:
                return
        group.wait_for_event(_POLL_SECONDS)


def _is_failure_timeout_over(stop_state: StopState, group: WorkerGroup) -> bool:
    """Return True if a rank failed, and the others had their grace period, or are all stopped and cannot use it."""
    bad = [end.record for end in group.ends.values() if end.status != 0]
    # Those that were done died in the interpreter's shutdown.
    failed = [record for record in bad if record is None or record.exit not in (EXIT_DONE, EXIT_STOPPED)]
    stop_state.failed_at = (stop_state.failed_at or time.monotonic()) if failed else None
    if stop_state.failed_at is None:
        return False
    stopped = group.find_stopped_ranks()
    if stopped and stopped == set(group.alive_ranks):
        return True
    has_reported = all(record is not None and record.exit not in (None, EXIT_USAGE) for record in failed)
    patience = FAILURE_GRACE_SECONDS if has_reported else KILLED_GRACE_SECONDS
    return time.monotonic() - stop_state.failed_at > patience


def _forward_signal(signum: int, stop_state: StopState, group: WorkerGroup) -> None:
    """Forward a signal to the workers; a second SIGTERM or SIGINT kills the group.

    Does not block on a reader of stderr that does not read (`| less`, Ctrl-S).
    """
    name = signal.Signals(signum).name
    if not stop_state.saves_checkpoint:
        stop_state.killed |= signum != signal.SIGUSR1
        return
    if signum in (signal.SIGTERM, signal.SIGINT):
        if stop_state.stop_requested_at is not None:
            stop_state.killed = time.monotonic() - stop_state.stop_requested_at > DUPLICATE_SIGNAL_SECONDS
            return
        stop_state.stop_requested_at = time.monotonic()
    reached = group.send_signal(signum)
    if signum == signal.SIGUSR1:
        print_error(f"dstrain: {name}: asked {reached} worker(s) to write a checkpoint; the run goes on")
        return
    if not reached:
        stop_state.killed = True
        print_error(f"dstrain: {name}: no worker has started yet, so there is nothing to save")
        return
    stop_state.is_stopping = True
    print_error(
        f"dstrain: {name}: asked {reached} worker(s) to write a checkpoint and stop; "
        "a second SIGTERM or Ctrl-C ends them at once"
    )


def _report_outcome(stop_state: StopState, group: WorkerGroup, outcome: LaunchOutcome) -> int:
    """Print why the launch failed. Returns the exit code."""
    if stop_state.killed and outcome.code == EXIT_FAILED:
        lost = "; what was not in a checkpoint is lost" if stop_state.is_stopping else ""
        _log_stderr(f"ended at once, as asked{lost}")
    elif stop_state.is_stopping and outcome.message and not _list_records(group.ends):
        _log_stderr("the signal came before a worker had begun, so there was nothing to save")
    elif outcome.message:
        if outcome.rank is not None and (is_debug() or not _has_error(group.ends, outcome.rank)):
            _print_output(group, outcome.rank)
        _log_stderr(outcome.message)
    return outcome.code


def _has_error(ends: Mapping[int, RankEnd], rank: int) -> bool:
    """Return True if the rank has recorded an error; else only its output may tell more than its exit code."""
    record = ends[rank].record if rank in ends else None
    return record is not None and record.error is not None


def _print_output(group: WorkerGroup, rank: int) -> None:
    """Print the end of what a rank wrote; that of rank 0 is on the terminal already."""
    log = log_path(group.run_dir, rank)
    if rank == 0 and log.exists():
        return
    if not _print_log_tail(log):
        _print_log_tail(group.find_output(rank))


def _print_log_tail(path: Path | None) -> bool:
    """Print the last lines of a log. Returns False if there are none."""
    if path is None:
        return False
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            tail = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return False
    if tail:
        _log_stderr("\n".join([f"the end of {path}:", *(f"  | {line}" for line in tail)]))
    return bool(tail)


def _log_stderr(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
        log_stderr(f"dstrain: {message}")


OUT_OF_MEMORY_HINT = " (is the host's memory full? see dmesg)"


@dataclass(frozen=True)
class LaunchOutcome:
    """Exit code; for all but 0 and 75 also the error message and the failed rank."""

    code: int
    message: str = ""
    rank: int | None = None


def compute_outcome(
    ends: Mapping[int, RankEnd], ranks: Collection[int], candidates: Collection[int] | None = None
) -> LaunchOutcome:
    """Return the outcome of a launch.

    `candidates`: the ranks whose processes ended unaided, in that order, one of which is to blame; None for all.
    """
    records = dict(_list_records(ends))
    codes = {rank: ends[rank].code for rank in ranks if rank in ends}
    refused = [rank for rank, code in codes.items() if code == EXIT_USAGE]
    if refused:
        return _make_failure(ends, refused[0], EXIT_USAGE)
    for code in (EXIT_DONE, EXIT_STOPPED):
        if records.keys() >= set(ranks) and set(codes.values()) == {code}:
            return LaunchOutcome(code)
    # Often all ranks do at the same step, and the first one to end says nothing more than the others.
    out_of_memory = [rank for rank, record in records.items() if record.error_kind == "memory"]
    if out_of_memory:
        rank, *others = out_of_memory
        headline = f"{_format_rank(ends, rank)} ran out of memory{_format_others(others)}"
        return LaunchOutcome(EXIT_FAILED, f"{headline}\n{records[rank].error}", rank)
    failed = [
        rank for rank in (ends if candidates is None else candidates) if codes[rank] not in (EXIT_DONE, EXIT_STOPPED)
    ]
    if failed:
        return _make_failure(ends, min(failed, key=lambda rank: _blame_order(ends[rank])), EXIT_FAILED)
    silent = [rank for rank in ranks if rank not in records]
    if silent:
        exit_text = describe_exit(ends[silent[0]].status if silent[0] in ends else None)
        return LaunchOutcome(EXIT_FAILED, f"rank {silent[0]} reported no result; it {exit_text}", silent[0])
    exits = ", ".join(f"rank {rank} with {record.exit}" for rank, record in records.items())
    return LaunchOutcome(EXIT_FAILED, f"the ranks ended differently: {exits}")


def _blame_order(end: RankEnd) -> int:
    """Return 0 for a rank that failed by itself, 1 for one that lost another rank, 2 for one that was sent SIGTERM."""
    if end.status == -signal.SIGTERM and not end.code:
        return 2
    return 1 if end.record is not None and end.record.error_kind == "peer" else 0


def _list_records(ends: Mapping[int, RankEnd]) -> list[tuple[int, RankRecord]]:
    """Return (rank, its record), by rank, of the ranks that began."""
    return [(rank, end.record) for rank, end in sorted(ends.items()) if end.record is not None]


def _make_failure(ends: Mapping[int, RankEnd], rank: int, code: int) -> LaunchOutcome:
    """Return the outcome of a launch that this rank has failed: its error, or how its process ended."""
    end = ends[rank]
    if end.record is None or end.record.exit is None:
        message = f"{_format_rank(ends, rank)} {describe_exit(end.status)}{_describe_kill(end)}"
        return LaunchOutcome(code, message + _describe_stopped(ends), rank)
    error = end.record.error
    alike = [other for other, record in _list_records(ends) if record.error == error] if error else [rank]
    message = f"{_format_rank(ends, alike[0])} failed with code {end.record.exit}{_format_others(alike[1:])}"
    if error:
        message += f": {error}"
    return LaunchOutcome(code, message + _describe_stopped(ends), alike[0])


def _describe_kill(end: RankEnd) -> str:
    """Return what may have killed a rank."""
    if end.status != -signal.SIGKILL:
        return ""
    return f": {end.kill_reason}; {HOST_MEMORY_FIX}" if end.kill_reason else OUT_OF_MEMORY_HINT


def _describe_stopped(ends: Mapping[int, RankEnd]) -> str:
    """Return which ranks could not go on since their processes were stopped; empty if there are none."""
    stopped = [rank for rank, end in sorted(ends.items()) if end.was_stopped]
    if not stopped:
        return ""
    return f"; stopped by SIGSTOP or a debugger: rank{'s' * (len(stopped) > 1)} {first_names(stopped, 8)}"


def _format_others(ranks: Sequence[int]) -> str:
    """Return `, and so did ranks 1, 2`; empty for no ranks."""
    return f", and so did rank{'s' * (len(ranks) > 1)} {first_names(ranks, 8)}" if ranks else ""


def _format_rank(ends: Mapping[int, RankEnd], rank: int) -> str:
    """Return `rank 3`; with its host's name if there are several hosts."""
    record = ends[rank].record
    several = len({record.host for _, record in _list_records(ends)}) > 1
    return f"rank {rank} on {record.host}" if several and record is not None else f"rank {rank}"


def describe_exit(status: int | None) -> str:
    """Return `was killed by SIGKILL` or `ended with code 3`."""
    if status is None:
        return "ended without a report"
    if status >= 0:
        return f"ended with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
