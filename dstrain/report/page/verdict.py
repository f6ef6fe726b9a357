"""A sentence about a run, and what the rules are given to find one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dstrain.report.progress import Progress, State, TimeUse, measure_progress, measure_time_use
from dstrain.report.run_history import RunHistory

Level = Literal["good", "info", "warning", "bad"]
MIN_ROWS = 8
"""Rows of training below which nothing is said about a column."""
LOWER_IS_BETTER = ("loss", "perplexity", "rmsd", "coordinate_loss", "mae", "kl")
"""Metrics of tasks of which less is better; `eval.best` says it for that of the recipe."""


@dataclass(frozen=True)
class Verdict:
    """A finding in words, and what to do about it."""

    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True)
class RunSummary:
    """A run as the rules see it."""

    history: RunHistory
    state: State
    reason: str = ""
    """Why the run failed, if that is known."""

    @cached_property
    def progress(self) -> Progress:
        """Position and speed of the run."""
        return measure_progress(self.history)

    @cached_property
    def time_use(self) -> TimeUse:
        """Where the time of the run went."""
        return measure_time_use(self.history)

    def column(self, name: str, split: str = "train") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (steps, values) of a column without NaN; empty arrays if it is absent."""
        columns = (self.history.train if split == "train" else self.history.eval).columns
        steps, values = np.array(columns["step"]), np.array(columns.get(name, []))
        if len(values) != len(steps):
            return np.zeros(0), np.zeros(0)
        finite = np.isfinite(values)
        return steps[finite], values[finite]

    def is_lower_better(self, name: str) -> bool:
        """Return True if lower values of a metric are better."""
        if name == self.history.get_setting("eval.metric"):
            return self.history.get_setting("eval.best") != "max"
        return name.endswith(LOWER_IS_BETTER)


Rule = Callable[[RunSummary], Iterator[Verdict]]


def format_number(value: float) -> str:
    """Return a number with three significant digits, or four where it has a thousand."""
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"


def format_share(share: float) -> str:
    """Return 0.124 as `12 %`; a share below one percent with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"
