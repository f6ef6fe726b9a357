"""Monitors of each step: profiler, grace period, trainability and non-finite values."""

from __future__ import annotations

from dataclasses import dataclass

from dstrain.batch import Progress, StepResult
from dstrain.train.health.grace import GracePeriod
from dstrain.train.health.nonfinite import NonFiniteGuard
from dstrain.train.health.trainability import TrainabilityCheck
from dstrain.train.profiler import StepProfiler


@dataclass(frozen=True, kw_only=True)
class StepMonitors:
    """The observers of a run that are called before and after each step."""

    profiler: StepProfiler
    grace: GracePeriod
    trainability: TrainabilityCheck
    nonfinite: NonFiniteGuard

    def start(self) -> None:
        """Record the weights before the first step of this start. Call it after loading. Collective."""
        self.trainability.start()

    def begin(self, step: int) -> None:
        """Begin to observe a step, counted from 1 as in metrics.jsonl."""
        self.profiler.begin_step(step)
        self.grace.begin_step()

    def end(self, result: StepResult, progress: Progress, lr: float) -> None:
        """Check the step just taken with learning rate `lr`. Raises RunError on every rank alike. Collective."""
        self.trainability.check_step(result, lr)
        self.nonfinite.check_step(result, progress)
        self.grace.end_step()
