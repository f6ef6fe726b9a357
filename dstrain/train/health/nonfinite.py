"""What happens when a loss or a gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable

from dstrain.batch import Progress, StepResult
from dstrain.errors import NonFiniteError, first_names

MAX_NONFINITE_STEPS = 3


class NonFiniteGuard:
    """Notes each step that was left out, and ends the run after three in a row where the recipe says stop."""

    def __init__(self, policy: str, is_fp16: bool, log_event: Callable[..., None]) -> None:
        self._policy, self._is_fp16, self._log_event = policy, is_fp16, log_event
        self._num_consecutive = 0
        self._num_applied = self._num_steps = 0
        self.num_skipped = 0
        """Steps of this start whose loss or gradients were not finite, so that the weights stayed; fp16's search for a scale aside."""

    def check_step(self, result: StepResult, progress: Progress) -> None:
        """Raises NonFiniteError, on every rank alike."""
        self._num_steps += 1
        if result.applied:
            self._num_applied += 1
            self._num_consecutive = 0
            return
        if self._is_fp16 and result.loss_is_finite:  # dynamic loss scaling looks for its scale this way
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
                f"the weights are as before them; lower optim.lr, look at these samples, or set on_nonfinite: skip"
            )

    def check_run(self, progress: Progress) -> None:
        """Raise NonFiniteError where a whole run changed no weight; called before its last checkpoint, on every rank alike."""
        if not self._num_applied and self._num_steps == progress.step:
            scale = "" if self.num_skipped else ", while fp16 was still looking for its loss scale"
            raise NonFiniteError(
                f"none of the {progress.step} steps changed the weights: loss or gradients were not finite{scale}; "
                f"{'look for nan in the weights of model.path and in the data' if self.num_skipped else 'train for more steps'}"
            )
