"""dstrain status and report: what a run folder records, and whether its processes are alive."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dstrain.errors import UsageError, one_line
from dstrain.files import get_host_id
from dstrain.launch.lease import (
    LEASE_TIMEOUT_SECONDS,
    LeaseHolder,
    find_live_holder,
    parse_holder,
    read_lease,
)
from dstrain.launch.processes import process_state
from dstrain.launch.worker import RankRecord, read_rank_records
from dstrain.report.page.render import GENERATOR
from dstrain.report.progress import Progress, State, find_end, measure_progress
from dstrain.report.run_history import RunHistory, is_number, open_run, parse_time
from dstrain.report.run_log import replace_nonfinite, task_metric_names
from dstrain.training.checkpoints import list_checkpoint_rows
from dstrain.training.run_report import REPORT_FILE, describe_run, write_page
from dstrain.training.state.manifest import COMPLETE_STATUS
from dstrain.units import format_bytes, format_count, format_duration


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """A launch, as far as this host can see it."""

    state: State
    holder: LeaseHolder | None
    """The last launch in this folder; None if its lease is gone, or the folder is a copy."""
    ranks: dict[int, RankRecord]
    alive_ranks: tuple[int, ...] | None
    """Ranks on this host whose process runs; None if the ranks are on other hosts."""
    reason: str = ""
    """Why the run failed, if a rank said so."""


def find_liveness(history: RunHistory, timeout: float = LEASE_TIMEOUT_SECONDS) -> Liveness:
    """Return the state of a run. Waits up to `timeout` seconds for a heartbeat of a launch on another host."""
    run_dir = history.run_dir
    holder, is_alive = None, False
    with contextlib.suppress(OSError):  # the folder of no launch, or one that this user may not read
        content = read_lease(run_dir)
        holder = parse_holder(content)
        if holder is not None and holder.machine == get_host_id() and holder.folder != run_dir.stat().st_ino:
            holder = None  # of the folder that this one is a copy of
        is_alive = holder is not None and find_live_holder(run_dir, content, timeout) is not None
    ranks = read_rank_records(run_dir, holder.launch) if holder is not None else {}
    ranks = ranks or read_rank_records(run_dir)  # of one without a `dstrain` command
    here = [
        rank
        for rank, record in ranks.items()
        if holder is not None and holder.machine == get_host_id() and record.host == holder.host
    ]
    running = (
        rank for rank in here if ranks[rank].exit is None and process_state(ranks[rank].pid) not in ("gone", "Z")
    )
    alive_ranks = tuple(running) if here else None
    failed = next((record for _, record in sorted(ranks.items()) if record.exit not in (None, 0, 75)), None)
    if is_alive:
        state: State = "running" if len(history.train) and find_end(history) is None else "starting"
    else:
        state = find_end(history) or ("failed" if failed else "unknown" if holder is None else "killed")
        if state == "stopped" and failed is not None:
            state = "failed"
    reason = failed.error if failed is not None and failed.error and state == "failed" else ""
    return Liveness(state=state, holder=holder, ranks=ranks, alive_ranks=alive_ranks, reason=reason)


LATE_FACTOR, LATE_SECONDS = 5.0, 60.0
"""A row is late after this many times the time between two rows, and after this many seconds at least."""


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the status of a run as JSON values. Raises UsageError (exit code 2) if the folder is no run."""
    history = open_run(run_dir)
    liveness, progress = find_liveness(history), measure_progress(history)
    age = None if math.isnan(progress.updated_at) else max(time.time() - progress.updated_at, 0.0)
    is_alive = liveness.state in ("running", "starting")
    left = progress.seconds_left if is_alive else None
    if left is not None and age is not None:
        left = max(left - age, 0.0)
    ends_at = None if left is None else datetime.fromtimestamp(time.time() + left).astimezone()
    checkpoints = list_checkpoint_rows(run_dir / "checkpoints")
    found = {
        "run": str(run_dir),
        "state": liveness.state,
        "reason": liveness.reason or _find_reason(history, liveness),
        "launch": _describe_launch(liveness),
        "step": progress.step,
        "total_steps": progress.total_steps,
        "epoch": progress.epoch,
        "samples": progress.samples,
        "seconds_per_step": progress.seconds_per_step,
        "seconds_left": left,
        "ends_at": ends_at and ends_at.isoformat(timespec="seconds"),
        "seconds_since_update": age,
        "is_late": is_alive and age is not None and _is_stale(progress, age),
        "last_train": history.train.last_row or None,
        "last_eval": history.eval.last_row or None,
        "last_checkpoint": next((one for one in checkpoints if one["state"] == COMPLETE_STATUS), None),
        "best_checkpoint": next((one for one in checkpoints if one["best"]), None),
        "last_event": history.events[-1] if history.events else None,
    }
    return replace_nonfinite(found)


def _describe_launch(liveness: Liveness) -> dict[str, Any] | None:
    holder = liveness.holder
    ranks = [
        {"rank": rank, "host": record.host, "pid": record.pid, "exit": record.exit}
        for rank, record in sorted(liveness.ranks.items())
    ]
    if holder is None:
        return {"host": None, "pid": None, "since": None, "ranks": ranks, "alive_ranks": None} if ranks else None
    alive = None if liveness.alive_ranks is None else list(liveness.alive_ranks)
    return {"host": holder.host, "pid": holder.pid, "since": holder.since, "ranks": ranks, "alive_ranks": alive}


def _find_reason(history: RunHistory, liveness: Liveness) -> str:
    if liveness.state != "failed":
        return ""
    return next((str(one.get("what") or "") for one in reversed(history.find_events("failed", "out_of_memory"))), "")


def _is_stale(progress: Progress, age: float) -> bool:
    return age > max(LATE_SECONDS, LATE_FACTOR * (progress.row_seconds or progress.seconds_per_step or 0.0))


def show_status(status: Mapping[str, Any]) -> str:
    """Return the status as lines of text."""
    return "\n".join(f"{name + ':':11} {one_line(text)}" for name, text in _iter_lines(status) if text)


def _iter_lines(status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reason = f": {status['reason'].splitlines()[0]}" if status["reason"] else ""
    yield "run", status["run"]
    yield "state", _explain_state(status) + reason
    yield "launch", _show_launch(status["launch"])
    total, epoch = status["total_steps"], status["epoch"]
    share = f" ({100 * status['step'] / total:.0f} %)" if total else ""
    yield (
        "step",
        f"{status['step']}{f' of {total}' if total else ''}{share}{'' if epoch is None else f', epoch {epoch:.3g}'}",
    )
    yield "speed", _show_speed(status)
    if status["seconds_left"] == 0:
        yield "ends", f"overdue: the last row is {format_duration(status['seconds_since_update'])} old"
    elif status["seconds_left"] is not None:
        yield "ends", f"in about {format_duration(status['seconds_left'])}, at {status['ends_at'].replace('T', ' ')}"
    for name in ("train", "eval"):
        if row := status[f"last_{name}"]:
            metrics = [
                metric for metric in ("loss", *task_metric_names(row), "lr", "grad_norm") if is_number(row.get(metric))
            ]
            yield name, f"step {row['step']}: " + ", ".join(f"{metric} {row[metric]:.4g}" for metric in metrics)
    for name in ("last", "best"):
        if one := status[f"{name}_checkpoint"]:
            metric = f", metric {one['metric']:.4g}" if is_number(one["metric"]) else ""
            yield (
                "checkpoint" if name == "last" else "best",
                f"step {one['step']}, {format_bytes(one['bytes'])}{metric}",
            )
    if event := status["last_event"]:
        details = event.get("what") or event.get("why") or event.get("checkpoint") or ""
        step = f" at step {event['step']}" if is_number(event.get("step")) else ""
        yield "event", f"{event['event']}{step}, {_show_age(event.get('time'))}" + (f": {details}" if details else "")


def _explain_state(status: Mapping[str, Any]) -> str:
    late = (
        f"; no row or event for {format_duration(status['seconds_since_update'])}, see logs/"
        if status["is_late"]
        else ""
    )
    words = {
        "running": f"running{late}",
        "starting": f"starting{late}",
        "finished": "finished",
        "stopped": "stopped by a signal; the same command continues",
        "failed": "failed",
        "killed": "dead: its processes ended without a report (killed, or host down); the same command continues",
        "unknown": "not running here; whether it runs elsewhere is not known (no lease in this folder)",
    }
    return words[status["state"]]


def _show_launch(launch: Mapping[str, Any] | None) -> str:
    if launch is None:
        return ""
    ranks = [
        f"{one['rank']} (pid {one['pid']}{' on ' + one['host'] if one['host'] != launch['host'] else ''})"
        for one in launch["ranks"]
    ]
    shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    count = None if launch["alive_ranks"] is None else len(launch["alive_ranks"])
    alive = "" if count is None else f"; {count or 'none'} alive on this host"
    head = f"process {launch['pid']} on {launch['host']}, since {launch['since']}" if launch["pid"] else ""
    return "; ".join(filter(None, [head, f"ranks {shown}{alive}" if ranks else ""]))


def _show_speed(status: Mapping[str, Any]) -> str:
    row = status["last_train"] or {}
    parts = (
        [f"{status['seconds_per_step']:.3g} s per step with evaluations and saves"]
        if status["seconds_per_step"]
        else []
    )
    for name in ("tokens_per_second", "samples_per_second"):
        if is_number(row.get(name)):
            parts.append(f"{format_count(float(f'{row[name]:.3g}'))} {name.removesuffix('_per_second')}/s")
    return ", ".join(parts)


def _show_age(text: object) -> str:
    age = time.time() - parse_time(text)
    return "at an unknown time" if math.isnan(age) else f"{format_duration(max(age, 0.0))} ago"


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
