"""Report page of a run folder: rewritten by a thread while the run goes on, and at its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dstrain.errors import EXIT_DONE, EXIT_STOPPED
from dstrain.files import atomic_write, remove_stale_partials
from dstrain.report.page.render import render_page
from dstrain.report.page.verdicts import RunSummary
from dstrain.report.progress import State, find_end
from dstrain.report.run_history import RunHistory
from dstrain.report.run_log import Row
from dstrain.training.checkpoints import list_checkpoint_rows

log = logging.getLogger(__name__)

REPORT_FILE = "report.html"
PAGE_INTERVAL_SECONDS = 60.0
"""Shortest time between two pages of a run that goes on."""
REST_PER_WORK = 100.0
"""Time between two pages over the time that one takes: the thread shares the interpreter with the training."""
CLOSE_TIMEOUT_SECONDS = 10.0
"""Limit for the last page: a file system that hangs must not keep a run that has ended."""


def describe_run(history: RunHistory, state: State, reason: str = "") -> RunSummary:
    """Return a run with its checkpoints, as it is shown on a page."""
    return RunSummary(history, state, reason, list_checkpoint_rows(history.run_dir / "checkpoints"))


def write_page(runs: Sequence[RunSummary], path: Path) -> None:
    """Write the page of runs. Readers find the old page or the new one. Raises OSError."""
    own_page = runs[0].history.run_dir / REPORT_FILE
    is_rewritten = len(runs) == 1 and runs[0].is_live and path.resolve() == own_page.resolve()
    atomic_write(path, render_page(runs, is_rewritten))


class ReportSink:
    """Sink that keeps `report.html` up to date. Rows are read from the run folder, not from `write`.

    A page that cannot be written is one warning; it never stops or delays the run.
    """

    def __init__(self, run_dir: Path, interval: float = PAGE_INTERVAL_SECONDS) -> None:
        """`interval`: seconds between two pages at least."""
        self._run_dir, self._interval = run_dir, interval
        self._has_rows, self._is_closed = threading.Event(), threading.Event()
        self._exit_code = EXIT_DONE
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def write(self, row: Row) -> None:
        """Note that there is a new row. Never waits."""
        self._has_rows.set()
        self._start()

    def close(self, exit_code: int = EXIT_DONE) -> None:
        """Write the last page, with how the run ended."""
        self._exit_code = exit_code
        self._is_closed.set()
        self._has_rows.set()
        self._start()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_SECONDS)

    def _start(self) -> None:
        if self._thread is not None or self._has_warned:
            return
        thread = threading.Thread(target=self._run, name="report", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # ulimit -u
            self._warn(error)
            return
        self._thread = thread

    def _run(self) -> None:
        history = RunHistory(self._run_dir)
        while not self._is_closed.is_set():
            self._has_rows.wait()
            self._has_rows.clear()
            if not self._is_closed.is_set():
                seconds = self._write(history, "running")
                self._is_closed.wait(max(self._interval, REST_PER_WORK * seconds))
        ends: dict[int, State] = {EXIT_DONE: "finished", EXIT_STOPPED: "stopped"}
        self._write(history, ends.get(self._exit_code, "failed"))

    def _write(self, history: RunHistory, state: State) -> float:
        """Write the page; return the seconds that it took."""
        start = time.perf_counter()
        path = self._run_dir / REPORT_FILE
        try:
            history.refresh()
            remove_stale_partials(path)
            end = None if state == "running" else find_end(history)
            write_page([describe_run(history, end or state)], path)
        except Exception as error:  # a page is never worth a run
            self._warn(error)
        return time.perf_counter() - start

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            path = self._run_dir / REPORT_FILE
            log.warning(
                "%s cannot be written (%s: %s); the run continues without it", path, type(error).__name__, error
            )
