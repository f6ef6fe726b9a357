"""Handling of steps with a non-finite loss or gradient."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.batch import Progress, StepResult
from dstrain.errors import NonFiniteError, first_names

MAX_NONFINITE_STEPS = 3


class NonFiniteGuard:
    """Record of skipped steps; with `on_nonfinite: stop`, three in a row end the run."""

    def __init__(self, policy: str, is_fp16: bool, log_event: Callable[..., None]) -> None:
        self._policy, self._is_fp16, self._log_event = policy, is_fp16, log_event
        self._num_consecutive = 0
        self._num_applied = self._num_steps = 0
        self.num_skipped = 0
        """Skipped steps since this start, without those in which fp16 searched for its loss scale."""

    def check_step(self, result: StepResult, progress: Progress) -> None:
        """Log a skipped step. Raises NonFiniteError after too many in a row, on every rank alike."""
        self._num_steps += 1
        if result.applied:
            self._num_applied += 1
            self._num_consecutive = 0
            return
        if self._is_fp16 and result.loss_is_finite:  # dynamic loss scaling searches for its scale this way
            self._log_event("loss_scale_lowered", step=progress.step)
            return
        self._num_consecutive += 1
        self.num_skipped += 1
        what = "gradients" if result.loss_is_finite else "loss"
        self._log_event("step_skipped", step=progress.step, why=f"{what} not finite", samples=list(result.suspects))
        if self._policy == "stop" and self._num_consecutive >= MAX_NONFINITE_STEPS:
            named = first_names(result.suspects, 16)
            raise NonFiniteError(
                f"step {progress.step}: the {what} of samples {named} is not finite, {MAX_NONFINITE_STEPS} steps in a row, "
                f"the weights were not changed by them; lower optim.lr, check these samples, or set on_nonfinite: skip"
            )

    def check_run(self, progress: Progress) -> None:
        """Raise NonFiniteError, on every rank alike, if no step of a whole run changed the weights."""
        if not self._num_applied and self._num_steps == progress.step:
            scale = "" if self.num_skipped else ", while fp16 was still searching for its loss scale"
            raise NonFiniteError(
                f"none of the {progress.step} steps changed the weights: loss or gradients were not finite{scale}; "
                f"{'look for nan in the weights of model.path and in the data' if self.num_skipped else 'train for more steps'}"
            )
