"""The line that shows progress: rates, time left, drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dstrain.report.run_history import RunHistory, is_number, parse_time
from dstrain.report.run_log import Row, task_metric_names

State = Literal["starting", "running", "finished", "stopped", "failed", "killed", "unknown"]
SPEED_ROWS = 20
"""Rows of training over which the present speed is measured."""
_ENDS: dict[str, State] = {
    "finished": "finished",
    "already_finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "out_of_memory": "failed",
}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Position and speed of a run."""

    step: int
    total_steps: int | None
    epoch: float | None
    samples: int | None
    seconds_per_step: float | None
    """Wall-clock time per step over the last rows, with evaluations and saves."""
    updated_at: float
    """Time of the last row or event, in seconds since 1970; NaN if there is none."""
    row_seconds: float | None
    """Time between two of the last rows of training."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds from `updated_at` to the last step; None if the speed or the number of steps is unknown."""
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(self.total_steps - self.step, 0) * self.seconds_per_step


@dataclass(frozen=True, kw_only=True)
class TimeUse:
    """Seconds of a run, over all its starts."""

    total: float
    compute: float
    data_wait: float
    save_stall: float
    evaluation: float

    @property
    def other(self) -> float:
        """Starts, steps that a resume took again, and what no column measures."""
        return max(self.total - self.compute - self.data_wait - self.save_stall - self.evaluation, 0.0)


def find_end(history: RunHistory) -> State | None:
    """Return how the last start ended by its events; None if it says nothing: it goes on, or was killed."""
    for event in reversed(history.events):
        if event["event"] in _ENDS:
            return _ENDS[event["event"]]
        if event["event"] in ("started", "micro_batch_reduced"):
            return None
    return None


def last_start(history: RunHistory) -> dict[str, Any]:
    """Return the event of the last start; empty if there is none."""
    return next((event for event in reversed(history.events) if event["event"] == "started"), {})


def measure_progress(history: RunHistory) -> Progress:
    """Return the position and speed of a run."""
    start, rows = last_start(history), history.train
    step = max(int(rows.columns["step"][-1]) if len(rows) else 0, _to_int(start.get("step")) or 0)
    row = rows.last_row
    seconds_per_step, row_seconds = _measure_speed(history, parse_time(start.get("time")))
    times = [parse_time(event.get("time")) for event in history.events[-1:]]
    times += [split.columns["time"][-1] for split in (rows, history.eval) if len(split)]
    return Progress(
        step=step,
        total_steps=_to_int(start.get("steps")) or _to_int(history.get_setting("steps")),
        epoch=float(row["epoch"]) if is_number(row.get("epoch")) else None,
        samples=_to_int(row.get("samples")),
        seconds_per_step=seconds_per_step,
        updated_at=max((time for time in times if math.isfinite(time)), default=math.nan),
        row_seconds=row_seconds,
    )


def _measure_speed(history: RunHistory, started_at: float) -> tuple[float | None, float | None]:
    """Return seconds per step and per row over the last rows of this start."""
    columns = history.train.columns
    times, steps = (np.array(columns[name][-SPEED_ROWS:]) for name in ("time", "step"))
    if math.isfinite(started_at):
        steps, times = steps[times >= started_at], times[times >= started_at]
    if len(steps) > 1 and steps[-1] > steps[0] and times[-1] > times[0]:
        return float((times[-1] - times[0]) / (steps[-1] - steps[0])), float((times[-1] - times[0]) / (len(steps) - 1))
    last = history.train.last_row.get("step_seconds")
    return (float(last) if is_number(last) and last > 0 else None), None


def measure_time_use(history: RunHistory) -> TimeUse:
    """Return where the time of a run went."""
    columns, zeros = history.train.columns, np.zeros(len(history.train))
    first = _to_int((history.find_events("started") or [{}])[0].get("step")) or 0
    taken = np.maximum(np.diff(np.array(columns["step"]), prepend=first), 0)
    per_step, wait = (
        np.nan_to_num(np.array(columns.get(name, zeros))) for name in ("step_seconds", "data_wait_seconds")
    )
    stall = float(np.nan_to_num(np.array(columns.get("save_stall_seconds", zeros))).sum())
    waited = float((wait * taken).sum())
    steps = float((per_step * taken).sum())
    evaluation = _measure_evaluation(history)
    total = max(_measure_total(history), steps + stall + evaluation)
    return TimeUse(
        total=total, compute=max(steps - waited, 0.0), data_wait=waited, save_stall=stall, evaluation=evaluation
    )


def _measure_evaluation(history: RunHistory) -> float:
    """Return the time between rows of training and of the evaluation that followed at the same step."""
    train, evaluated = history.train.columns, history.eval.columns
    times = dict(zip(train["step"], train["time"], strict=True))
    pairs = ((time, times.get(step, math.nan)) for step, time in zip(evaluated["step"], evaluated["time"], strict=True))
    return sum(after - before for after, before in pairs if after > before)


def _measure_total(history: RunHistory) -> float:
    """Return the seconds from each start to its last row or event."""
    times = np.sort(
        np.concatenate(
            [
                _finite([parse_time(event.get("time")) for event in history.events]),
                _finite(history.train.columns["time"]),
                _finite(history.eval.columns["time"]),
            ]
        )
    )
    starts = _finite([parse_time(event.get("time")) for event in history.find_events("started")])
    if not len(times):
        return 0.0
    edges = [*(starts if len(starts) else times[:1]), math.inf]
    total = 0.0
    for begin, end in pairwise(edges):
        inside = times[(times >= begin) & (times < end)]
        total += float(inside[-1] - inside[0]) if len(inside) else 0.0
    return total


def _finite(values: Any) -> NDArray[np.float64]:
    found = np.array(values, dtype=np.float64)
    return found[np.isfinite(found)]


def _to_int(value: object) -> int | None:
    return int(value) if is_number(value) else None


EVAL_PREFIX = "eval at step"
MIN_BAR, MAX_BAR = 5, 40
"""Columns of the bar; below the first it is left out."""
GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
GAP = "  "


@dataclass
class ProgressLine:
    """Progress of a run in steps and time; times are of one monotonic clock, in seconds."""

    total_steps: int
    step: int = 0
    epoch: float = 0.0
    _first: tuple[int, float] | None = field(default=None, init=False)
    """Step and time of the first step that this start has taken."""
    _last_time: float = field(default=0.0, init=False)
    _started: float | None = field(default=None, init=False)

    def advance(self, step: int, epoch: float, now: float) -> None:
        """Note that a step was taken at the time `now`."""
        self.step, self.epoch, self._last_time = step, epoch, now
        if self._first is None:
            self._first = step, now

    def seconds_left(self, now: float) -> float | None:
        """Return the expected time to the last step; None before the second step of this start.

        From the mean time of a step since the first one, with evaluations and saves in it; the first is slower.
        """
        if self._first is None or self.step <= self._first[0]:
            return None
        mean = (self._last_time - self._first[1]) / (self.step - self._first[0])
        return max(0.0, mean * (self.total_steps - self.step) - (now - self._last_time))

    def render(self, width: int, now: float, use_color: bool = True) -> str:
        """Return the line in at most `width` columns: steps, time left, bar, elapsed time, epoch, share."""
        if self._started is None:
            self._started = now
        left = self.seconds_left(now)
        share = min(1.0, self.step / max(1, self.total_steps))
        steps = f"{self.step}/{self.total_steps}"
        wanted = [
            ("left", f"{format_clock(left)} left"),
            ("elapsed", f"{format_clock(now - self._started)} elapsed"),
            ("epoch", f"epoch {self.epoch:.2f}"),
            ("share", f"{share:.0%}"),
        ]
        shown = {"steps": steps}
        used = len(steps)
        for name, text in wanted:  # the most important first
            reserve = MIN_BAR + len(GAP) if name not in ("left",) else 0
            if used + len(GAP) + len(text) + reserve <= width:
                shown[name] = text
                used += len(GAP) + len(text)
        bar = _draw_bar(share, min(MAX_BAR, width - used - len(GAP)), use_color)
        order = (shown["steps"], bar, shown.get("share"), shown.get("epoch"), shown.get("elapsed"), shown.get("left"))
        line = GAP.join(part for part in order if part)
        return line if bar or len(line) <= width else line[:width]


def _draw_bar(share: float, width: int, use_color: bool) -> str:
    if width < MIN_BAR:
        return ""
    full = int(share * width)
    done, rest = "━" * full, "─" * (width - full)
    return f"{GREEN}{done}{RESET}{DIM}{rest}{RESET}" if use_color else done + rest


def format_clock(seconds: float | None) -> str:
    """Return 3725 as `1:02:05`, 65 as `1:05`; `-:--` for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True)
class TableLayout:
    """Columns of the table: (heading, name in the row, format, width); `extra` are texts at the end of the row."""

    columns: tuple[tuple[str, str, str, int], ...]
    extra: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the headings."""
        return tuple(column[0] for column in self.columns)

    def header(self) -> str:
        """Return the line with the headings."""
        return GAP.join(heading.rjust(width) for heading, _, _, width in self.columns)


def choose_columns(row: Row, total_steps: int, width: int, extra: Sequence[str] = ()) -> TableLayout:
    """Return the columns of a row that fit into `width`; the first ones are kept, step and loss always."""
    metrics = [(name, name, ".3g") for name in task_metric_names(row)]
    wanted = [
        ("step", "step", "d"), ("loss", "loss", ".4g"), *metrics, ("lr", "lr", ".3g"), ("grad", "grad_norm", ".3g"),
        ("s/step", "step_seconds", ".3g"), ("tokens/s", "tokens_per_second", ".0f"), ("epoch", "epoch", ".2f"),
        ("skipped", "skipped", "d"),
    ]  # fmt: skip
    columns: list[tuple[str, str, str, int]] = []
    used = 0
    for heading, name, how in wanted:
        if name not in row:
            continue
        narrowest = len(str(total_steps)) if name == "step" else 8
        size = max(len(heading), narrowest, len(format_number(row[name], how)))
        size = min(size, width) if len(columns) < 2 else size
        gap = len(GAP) if columns else 0
        if used + gap + size <= width or len(columns) < 2:
            columns.append((heading, name, how, size))
            used += gap + size
    kept = [text for text in extra if (used := used + len(GAP) + len(text)) <= width]
    return TableLayout(tuple(columns), tuple(kept))


def format_table_row(row: Row, layout: TableLayout) -> str:
    """Return the row under the headings of a layout."""
    cells = [format_number(row.get(name), how).rjust(width) for _, name, how, width in layout.columns]
    return GAP.join([*cells, *layout.extra])


def format_number(value: Any, format_spec: str) -> str:
    """Return the number in this format; the text of a value that is none."""
    return format(value, format_spec) if isinstance(value, (int, float)) else str(value)
