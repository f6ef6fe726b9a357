"""Checks before and in training: parameters with gradients, values that are not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from dstrain.batch import Progress, StepResult
from dstrain.errors import NonFiniteError, RunError, first_names
from dstrain.process_setup import log_stdout
from dstrain.training.engine.base import Engine
from dstrain.training.engine.module import TrainModule
from dstrain.training.state.layout import StateSlice

CHECKED_STEPS = 3
"""Steps before the check. LoRA's A matrices change only from the second on: B starts at zero, and so do their gradients."""
CHUNK_NUMEL = 1 << 22
"""Values summed at a time, which bounds the float64 copy."""


class TrainabilityCheck:
    """Report of trainable parameters without a gradient or without a change after the first steps.

    It is an error if none changed and, with ZeRO, if some micro-batches give a parameter a gradient and others do not.
    """

    def __init__(self, engine: Engine, train_module: TrainModule, log_event: Callable[..., None]) -> None:
        self._engine, self._train_module, self._log_event = engine, train_module, log_event
        self._num_grads: Counter[str] = Counter()
        """Parameter -> gradients in this step."""
        self._names_with_grad: set[str] = set()
        self._hooks: list[Any] = []
        self._trainable_names: list[str] = []
        self._initial_checksums: dict[tuple[str, int], tuple[int, float]] = {}
        self._steps_left = CHECKED_STEPS

    def start(self) -> None:
        """Record checksums of the weights. Call it after loading. Collective if weights are offloaded to NVMe."""
        for name, parameter in self._train_module.model.named_parameters():
            if name in self._train_module.trainable_names:
                self._trainable_names.append(name)
                # A hook, since ZeRO partitions and frees gradients before the step returns.
                self._hooks.append(parameter.register_hook(self._make_grad_hook(name)))
        self._initial_checksums = _compute_checksums(self._engine.state_slices())

    def check_step(self, result: StepResult, lr: float) -> None:
        """Count a step, and run the check after the last of `CHECKED_STEPS`; that call is collective.

        Raises RunError on every rank alike if no parameter changed, and on this rank if its micro-batches differ in the
        parameters that get a gradient.
        """
        if self._engine.needs_all_gradients:
            self._compare_micro_batches(result.micro_batches)
        self._names_with_grad |= self._num_grads.keys()
        self._num_grads.clear()
        # A skipped step, or one with learning rate 0, changes nothing.
        if not self._steps_left or not result.applied or not lr:
            return
        self._steps_left -= 1
        if not self._steps_left:
            if not self._engine.needs_all_gradients:
                for hook in self._hooks:
                    hook.remove()
            self._check_updates(lr)

    def _make_grad_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def count(gradient: torch.Tensor) -> None:
            self._num_grads[name] += 1

        return count

    def _compare_micro_batches(self, num_micro_batches: int) -> None:
        """Raise RunError if a parameter has a gradient in some micro-batches of this rank, of all steps, but not in all."""
        expected = self._names_with_grad or self._num_grads.keys()  # of the first step: those of any micro-batch
        missing = {name for name in expected if self._num_grads[name] < num_micro_batches}
        if uneven := missing | (self._num_grads.keys() - expected):
            raise _uneven_gradients([name for name in self._trainable_names if name in uneven])

    def _check_updates(self, lr: float) -> None:
        world = self._engine.world
        moved = {
            name
            for (name, start), sums in _compute_checksums(self._engine.state_slices()).items()
            if sums != self._initial_checksums[name, start]
        }
        # Each rank holds a part of the state, and a rank's micro-batches may not reach every parameter.
        moved = set().union(*world.gather(moved))
        reached_by_rank = world.gather(self._names_with_grad)
        reached = set().union(*reached_by_rank)
        if self._engine.needs_all_gradients and (uneven := reached.difference(set.intersection(*reached_by_rank))):
            raise _uneven_gradients([name for name in self._trainable_names if name in uneven])
        without = [name for name in self._trainable_names if name not in reached]
        still = [name for name in self._trainable_names if name in reached and name not in moved]
        if not moved:
            raise RunError(
                f"none of the {len(self._trainable_names)} trainable parameters changed in the first {CHECKED_STEPS} steps (learning rate {lr:g}): "
                + ("none got a gradient; the task's loss must depend on the model's outputs"
                   if not reached else "raise optim.lr, or check the task's loss")
            )  # fmt: skip
        if without or still:
            self._log_event("parameters_without_update", without_gradient=without, not_moved=still)
            if world.rank == 0:
                log_stdout("\n".join(self._format_warnings(without, still)))

    def _format_warnings(self, without_grad: Sequence[str], unchanged: Sequence[str]) -> Iterator[str]:
        total = len(self._trainable_names)
        if without_grad:
            yield (
                f"warning: {len(without_grad)} of {total} trainable parameters got no gradient in the first {CHECKED_STEPS} "
                f"steps: {first_names(without_grad)}; the loss does not depend on them: add them to model.freeze, or fix the task"
            )
        if unchanged:
            yield f"warning: {len(unchanged)} of {total} did not change, their gradients were zero: {first_names(unchanged)}"


def _uneven_gradients(names: Sequence[str]) -> RunError:
    return RunError(
        f"{len(names)} trained parameters got a gradient in some micro-batches but not in all: {first_names(names)}; ZeRO "
        "adds gradients of different parameters then, or those of an earlier step: let the loss of every micro-batch depend "
        "on them, with 0.0 * weight.sum() where they are not used, or train with --ds-config zero0"
    )


def _compute_checksums(slices: Iterable[Sequence[StateSlice]]) -> dict[tuple[str, int], tuple[int, float]]:
    """Return (parameter, first element) -> checksums of the trainable ranges on this rank.

    The sum of the bits finds a change that the sum of the values rounds away. The host reads all sums in two copies.
    """
    places, bit_sums, value_sums = [], list[torch.Tensor](), list[torch.Tensor]()
    for parts in slices:
        for part in parts:
            if part.optimizer is None:
                continue
            flat = part.tensor.detach().view(-1)
            for place in part.ranges:
                pieces = flat.narrow(0, place.offset, place.numel).split(CHUNK_NUMEL)
                words = torch.int32 if flat.element_size() == 4 else torch.int16
                places.append((place.name, place.start))
                bit_sums.append(sum(piece.view(words).sum(dtype=torch.int64) for piece in pieces))
                value_sums.append(sum(piece.double().sum() for piece in pieces))
    if not places:
        return {}
    sums = zip(torch.stack(bit_sums).tolist(), torch.stack(value_sums).tolist(), strict=True)
    return dict(zip(places, sums, strict=True))


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
