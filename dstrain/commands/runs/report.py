"""`dstrain report`: the report page of one run, or of several overlaid."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from dstrain.commands.runs.liveness import find_liveness
from dstrain.errors import UsageError
from dstrain.report.page.render import GENERATOR
from dstrain.report.run_history import open_run
from dstrain.train.run_report import REPORT_FILE, describe_run, write_page

log = logging.getLogger(__name__)

MAX_RUNS = 50


def make_report(run_dirs: Sequence[Path], target: Path | None) -> Path:
    """Write the report of runs; return its path: by default in the run folder, of several in the working folder.

    Raises UsageError (exit code 2) if a folder is no run, or the file cannot or must not be written.
    """
    if len(run_dirs) > MAX_RUNS:
        raise UsageError(f"dstrain report: {len(run_dirs)} runs; give at most {MAX_RUNS}")
    histories = [open_run(run_dir) for run_dir in run_dirs]
    path = target or (run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(REPORT_FILE))
    _check_overwrite(path)
    runs = []
    for history in histories:
        liveness = find_liveness(history)
        runs.append(describe_run(history, liveness.state, liveness.reason))
    try:
        write_page(runs, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); give another file with --to") from None
    return path


def _check_overwrite(path: Path) -> None:
    """Raise UsageError for a file that no report has written."""
    try:
        with path.open("rb") as file:
            is_report = GENERATOR.encode() in file.read(1024)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); give another file with --to") from None
    if not is_report:
        raise UsageError(f"{path}: already exists, and is no report; give another file with --to")


def rewrite_report(run_dir: Path) -> None:
    """Write the page of a run that failed, after its processes have ended. Never raises."""
    try:
        history = open_run(run_dir)
        liveness = find_liveness(history, timeout=0)
        if liveness.state in ("running", "starting"):  # another launch has taken the folder over
            return
        write_page(
            [describe_run(history, "failed" if liveness.state == "unknown" else liveness.state, liveness.reason)],
            run_dir / REPORT_FILE,
        )
    except Exception as error:  # a page must not change how a launch ends
        log.warning("%s cannot be written (%s: %s)", run_dir / REPORT_FILE, type(error).__name__, error)
