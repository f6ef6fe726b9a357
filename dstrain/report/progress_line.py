"""Texts of a terminal: the progress line, and rows of metrics as a table that fits the width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dstrain.report.run_log import Row, task_metric_names

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
