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

from dstrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from dstrain.launch.exit_code import LaunchOutcome, compute_outcome
from dstrain.launch.heartbeat import print_error
from dstrain.launch.job import LaunchedJob
from dstrain.launch.worker import DUPLICATE_SIGNAL_SECONDS, finish_log_copy, log_path, set_child_subreaper

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""To a worker each of them means: write a checkpoint and stop."""
EXIT_GRACE_SECONDS = 0.5
"""What is left gets this long to end by itself once the launcher is gone."""
CHECKPOINT_TIMEOUT_SECONDS = 300.0
"""Workers get this long for their checkpoint where the launcher died of the signal that asked for it."""
FAILURE_GRACE_SECONDS = 8.0
"""Once a rank has failed the others get this long to say why they cannot go on; DeepSpeed's launcher gives them 30."""
KILLED_GRACE_SECONDS = 2.0
"""The same where it was killed: they could only say that it is gone."""
_POLL_SECONDS = 0.05


class StopState:
    """What a launch was asked to do, and when."""

    def __init__(self, saves_checkpoint: bool = True) -> None:
        self.saves_checkpoint = saves_checkpoint
        """The workers write a checkpoint when they are asked to stop; others are ended at the first signal."""
        self.first_signal_at: float | None = None
        """When a signal was first passed on."""
        self.stop_requested_at: float | None = None
        """When SIGTERM or SIGINT first was: the next one ends everything."""
        self.failed_at: float | None = None
        """When a rank was first seen to have ended badly."""
        self.killed = False
        """Ended at once, as someone asked."""


def supervise(job: LaunchedJob, stop_state: StopState | None = None) -> int:
    """Run a launch to its end. Returns the exit code for the shell. What was asked of it is left in `watch`.

    0 done, 2 bad usage, 75 stopped after a checkpoint, 1 everything else. Output goes where ours goes.
    Call it from the main thread.
    """
    stop_state = stop_state or StopState()
    with _capture_signals() as signals, _as_subreaper():
        try:
            job.start()
            _wait_for_exit(stop_state, job, signals)
        finally:
            # Of what ended by itself; the rest is about to be ended by us.
            launcher, ends, lost = job.poll_launcher(), dict(job.exit_codes), job.abort_reason
            stubborn = job.kill()
    job.poll(force=True)
    finish_log_copy()
    if stubborn:
        _log_stderr(f"these processes could not be ended: {', '.join(stubborn)}")
    result = compute_outcome(
        job.records,
        ends if stop_state.failed_at else job.exit_codes,
        EXIT_FAILED if launcher is None else launcher,
        job.ranks,
    )
    if lost and result.code not in (EXIT_DONE, EXIT_STOPPED):
        _log_stderr(job.abort_reason)  # with what became of those that were given up
        return EXIT_FAILED
    return _report_outcome(stop_state, job, result)


@contextlib.contextmanager
def _capture_signals() -> Iterator[deque[int]]:
    """Queue the signals to pass on, instead of dying of them. One that was ignored stays so, as nohup wants it."""
    queue: deque[int] = deque()

    def enqueue(signum: int, frame: FrameType | None) -> None:
        queue.append(signum)

    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, enqueue)
    try:
        yield queue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _as_subreaper() -> Iterator[None]:
    set_child_subreaper(True)
    try:
        yield
    finally:
        set_child_subreaper(False)


def _wait_for_exit(stop_state: StopState, job: LaunchedJob, signals: deque[int]) -> None:
    """Until the launcher is gone, and, where workers were asked to stop, until those are gone too."""
    gone_at: float | None = None
    while not stop_state.killed:
        job.poll()
        while signals:
            _forward_signal(signals.popleft(), stop_state, job)
        if job.abort_reason or _is_failure_timeout_over(stop_state, job):
            return
        if job.poll_launcher() is not None:
            gone_at = gone_at or time.monotonic()
            waited = time.monotonic() - gone_at
            saving = stop_state.first_signal_at is not None and waited < CHECKPOINT_TIMEOUT_SECONDS and job.alive_ranks
            if not job.is_alive() or (waited > EXIT_GRACE_SECONDS and not saving):
                return
        job.wait_for_event(_POLL_SECONDS)


def _is_failure_timeout_over(stop_state: StopState, job: LaunchedJob) -> bool:
    """Whether a rank failed so long ago that the others will not end by themselves."""
    bad = {rank for rank, status in job.exit_codes.items() if status != 0}
    if not bad:
        return False
    codes = {rank: record.exit for rank, record in job.records.items() if rank in bad}
    bad -= {rank for rank, code in codes.items() if code in (EXIT_DONE, EXIT_STOPPED)}  # it died while Python shut down
    stop_state.failed_at = (stop_state.failed_at or time.monotonic()) if bad else None
    patience = KILLED_GRACE_SECONDS if any(codes.get(rank) is None for rank in bad) else FAILURE_GRACE_SECONDS
    return stop_state.failed_at is not None and time.monotonic() - stop_state.failed_at > patience


def _forward_signal(signum: int, stop_state: StopState, job: LaunchedJob) -> None:
    """Give the signal to the workers; a second SIGTERM or SIGINT ends everything. Waits for no reader (`| less`, Ctrl-S)."""
    name = signal.Signals(signum).name
    if not stop_state.saves_checkpoint:
        stop_state.killed = True
        return
    if signum in (signal.SIGTERM, signal.SIGINT):
        if stop_state.stop_requested_at is not None:
            stop_state.killed = time.monotonic() - stop_state.stop_requested_at > DUPLICATE_SIGNAL_SECONDS
            return
        stop_state.stop_requested_at = time.monotonic()
    reached = job.send_signal(signum)
    if not reached:
        stop_state.killed = True
        print_error(f"dstrain: {name}: no worker has started yet, so there is nothing to save")
        return
    stop_state.first_signal_at = stop_state.first_signal_at or time.monotonic()
    print_error(
        f"dstrain: {name}: asked {reached} worker(s) to write a checkpoint and stop; a second SIGTERM or Ctrl-C ends them at once"
    )


def _report_outcome(stop_state: StopState, job: LaunchedJob, outcome: LaunchOutcome) -> int:
    """Say what went wrong, after the last lines of the rank to blame. Returns the exit code."""
    if stop_state.killed and outcome.code == EXIT_FAILED:
        _log_stderr(
            "ended at once, as asked" + ("; what was not in a checkpoint is lost" if stop_state.first_signal_at else "")
        )
        return outcome.code
    if not outcome.message:
        return outcome.code
    if stop_state.first_signal_at is not None and not job.records:
        _log_stderr("the signal came before a worker had begun, so there was nothing to save")
        return outcome.code
    record = None if outcome.rank is None else job.records.get(outcome.rank)
    told_already = outcome.rank == 0 and record is not None and record.exit is not None  # rank 0 has the terminal
    own = None if outcome.rank is None else log_path(job.run_dir, outcome.rank)
    if not (told_already or _print_log_tail(own)):
        _print_log_tail(job.find_launcher_log(outcome.rank))
    if not (told_already and outcome.code == EXIT_USAGE):  # its error is the last line there
        _log_stderr(outcome.message)
    return outcome.code


def _print_log_tail(path: Path | None, max_lines: int = 20) -> bool:
    """Whether there was something to show."""
    if path is None:
        return False
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 64 * 1024))
            tail = log.read().decode(errors="replace").splitlines()[-max_lines:]
    except OSError:
        return False
    if tail:
        _log_stderr("\n".join([f"the end of {path}:", *(f"  | {line}" for line in tail)]))
    return bool(tail)


def _log_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        print(f"dstrain: {text}", file=sys.stderr, flush=True)
