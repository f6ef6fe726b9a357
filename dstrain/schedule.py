"""Learning rate schedules, intervals in steps, and the end of a run whose metric gets no better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

from dstrain.errors import RecipeError, suggest_name

WSD_DECAY_FRACTION = 0.1
"""Share of the steps that `wsd` decays over; MiniCPM found a tenth to be enough (arXiv 2404.06395, section 4.2)."""


def fraction_of_steps(steps: int, fraction: float) -> int:
    """Return a fraction of the steps, rounded up; 0.07 of 100 steps is 7, although the float product is more."""
    return math.ceil(round(steps * fraction, 9))


@dataclass(frozen=True)
class Every:
    """Interval in steps."""

    steps: int | Fraction | None
    """Steps from one time to the next, a fraction where an epoch ends within a step; None for never."""

    def __post_init__(self) -> None:
        assert self.steps is None or self.steps > 0, f"Every({self.steps}): the configuration accepts only 1 and more"

    def is_due(self, step: int) -> bool:
        """Return True if it is due after `step` steps."""
        return self.steps is not None and step > 0 and step // self.steps > (step - 1) // self.steps


@dataclass(frozen=True)
class Due:
    """Work that is due after a step."""

    log: bool
    eval: bool
    save: bool
    is_last: bool
    """No step follows."""


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """Steps at which a run logs, evaluates, saves and ends, and its learning rate."""

    total_steps: int
    lr: LRSchedule
    log_every: Every
    eval_every: Every
    save_every: Every

    def due_after(self, step: int, stop: bool) -> Due:
        """Return what is due after `step` steps. A run that stops early is logged and saved, not evaluated."""
        done = step >= self.total_steps
        return Due(
            log=self.log_every.is_due(step) or done or stop,
            eval=done or (self.eval_every.is_due(step) and not stop),
            save=self.save_every.is_due(step) or done or stop,
            is_last=done or stop,
        )


@dataclass(kw_only=True)
class EarlyStopping:
    """Count of evaluations in a row without a better metric. Each checkpoint records it in run.json."""

    metric: str
    mode: Literal["min", "max"]
    patience: int | None = None
    """Evaluations in a row without a better metric after which the run ends; None: never."""
    best: float | None = None
    """The best value; None before the first finite one."""
    best_step: int | None = None
    counter: int = 0
    """Evaluations since the best one."""

    def add(self, step: int, value: float | None) -> None:
        """Count an evaluation. A value that is missing or not finite is not better."""
        sign = 1 if self.mode == "min" else -1
        is_finite = value is not None and math.isfinite(value)
        if value is not None and is_finite and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step, self.counter = value, step, 0
        else:
            self.counter += 1

    @property
    def is_due(self) -> bool:
        """True where the run is to end."""
        return self.patience is not None and self.counter >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint records."""
        return {name: value for name, value in asdict(self).items() if name != "patience"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count of a checkpoint; one of another metric is not continued."""
        if (state.get("metric"), state.get("mode")) == (self.metric, self.mode):
            self.best, self.best_step, self.counter = state["best"], state["best_step"], state["counter"]

    def __str__(self) -> str:
        best = "no finite value" if self.best is None else f"the best is {self.best:.6g} of step {self.best_step}"
        return f"{self.counter} evaluations in a row without a better {self.metric}; {best}"


def _constant(step: int, decay_steps: int) -> float:
    return 1.0


def _linear(step: int, decay_steps: int) -> float:
    return max(0.0, 1.0 - step / max(1, decay_steps))


def _cosine(step: int, decay_steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, decay_steps))))


SCHEDULES: dict[str, Callable[[int, int], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
"""Name -> function from (steps since the warmup, all steps after the warmup) to a fraction of the peak."""

SCHEDULE_NAMES = (*SCHEDULES, "wsd")


def warmup_steps(steps: int, warmup: float) -> int:
    """Return warmup steps: `warmup` below 1 is a fraction of the steps, rounded up; from 1 on it is steps."""
    return fraction_of_steps(steps, warmup) if warmup < 1 else round(warmup)


def compute_lr(step: int, *, schedule: str, steps: int, warmup: float, peak: float) -> float:
    """Return the learning rate of a step, counted from 0, of `steps` in all.

    The shapes are those of transformers' `get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup`, except for the warmup: theirs starts at 0, which wastes the first
    batch; ours starts at peak / warmup steps and reaches the peak with its last step. As there, the
    rate reaches 0 only at `step == steps`, after the last step.

    `wsd` (warmup, stable, decay; arXiv 2404.06395) stays at the peak and decays over the last tenth,
    linearly as in Hägele et al. (arXiv 2405.18392); MiniCPM halves the rate at intervals instead.
    Raises RecipeError for an unknown schedule.
    """
    if schedule not in SCHEDULE_NAMES:
        raise RecipeError(
            f"optim.schedule: no schedule is called '{schedule}'; {suggest_name(schedule, SCHEDULE_NAMES)}"
        )
    rising = warmup_steps(steps, warmup)
    if step < rising:
        return peak * (step + 1) / rising
    if schedule == "wsd":
        # A warmup longer than the rest leaves no stable part.
        start = max(rising, steps - fraction_of_steps(steps, WSD_DECAY_FRACTION))
        return peak * _linear(max(0, step - start), steps - start)
    return peak * SCHEDULES[schedule](step - rising, steps - rising)


def scale_lr(peak: float, rule: Literal["none", "linear", "sqrt"], samples_per_step: int, base: int) -> float:
    """Return the peak for steps of `samples_per_step`, given a peak tuned for steps of `base` samples.

    `linear` keeps the sum of updates per sample as the batch grows (arXiv 1706.02677); `sqrt` keeps
    their variance, which fits Adam better (arXiv 2205.10287).
    """
    ratio = samples_per_step / base
    return peak * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate of a run as a function of the step, counted from 0."""

    peak: float
    """Highest rate, reached at the end of the warmup."""
    schedule: str
    """constant, linear, cosine or wsd."""
    steps: int
    """Steps of the whole run."""
    warmup: float = 0.0
    """Below 1 a fraction of the steps, from 1 on steps."""

    def __call__(self, step: int) -> float:
        return compute_lr(step, schedule=self.schedule, steps=self.steps, warmup=self.warmup, peak=self.peak)
