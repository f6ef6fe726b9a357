"""Engine in plain PyTorch and one process, which defines what a training step is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import OptimConfig
from dstrain.distributed.world import SingleProcessWorld, World
from dstrain.models.params import ParamGroup
from dstrain.train.engine.module import (
    OPTIMIZER_UPDATE,
    StepAccumulator,
    TrainModule,
    compute_step_stats,
    describe_pass,
    evaluate_batch,
    scale_loss_or_nan,
    set_lr,
    step_outcome,
    total_step_weight,
    with_scores,
    with_step_stats,
)
from dstrain.train.engine.optimizers import make_optimizer
from dstrain.train.state.engine_state import iter_state, load_state
from dstrain.train.state.files import CheckpointReader, StateFile, iter_state_files
from dstrain.train.state.layout import StateSlice


class TorchEngine:
    """Reference implementation of a step; tests compare DeepSpeedEngine with it."""

    def __init__(
        self, train_module: TrainModule, param_groups: Sequence[ParamGroup], optim: OptimConfig, device: torch.device
    ) -> None:
        self.world: World = SingleProcessWorld(device)
        self.train_module = train_module.to(device)
        self._lr_scales = [group.lr_scale for group in param_groups]
        self._optimizer = make_optimizer(param_groups, optim, None, device)
        # inf: the norm is computed, and nothing is clipped.
        self._max_grad_norm = optim.clip or math.inf
        self._optimizer_name = optim.name

    @property
    def unwrapped(self) -> TrainModule:
        return self.train_module

    @property
    def is_sharded(self) -> bool:
        return False

    def step(self, batches: Sequence[Batch], lr: float, weight: float | None = None) -> StepResult:
        self.train_module.train()
        batches = with_scores(self.train_module, batches, self.world)
        # Before the losses, as in DeepSpeedEngine.
        batches = with_step_stats(self.train_module, self.train_module.loss_inputs, batches, self.world)
        # Weights may follow from scores, which are known only now.
        known = None if len(self.train_module.reward_models) else weight
        weight = total_step_weight(batches, self.world, self.train_module.loss_inputs, known)
        sums = StepAccumulator()
        for index, batch in enumerate(batches):
            self.world.log.activity = describe_pass("forward", index, batches)
            total, metrics = self.train_module(batch.to(self.world.device))
            self.world.log.activity = describe_pass("backward", index, batches)
            scale_loss_or_nan(total, 1 / weight).backward()
            sums.add(total, metrics)
        self.world.log.activity = OPTIMIZER_UPDATE
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self._max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            set_lr(self._optimizer, self._lr_scales, lr)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        outcome = step_outcome(sums, batches, applied, self.world)
        self.world.log.activity = ""
        return sums.result(batches, grad_norm=norm, **outcome)

    def evaluate(self, batch: Batch) -> StepResult:
        return evaluate_batch(self.train_module, batch, self.world)

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        self.train_module.eval()
        return compute_step_stats(self.train_module, batches, self.world)

    def state_slices(self) -> Iterator[list[StateSlice]]:
        return iter_state(self.train_module.stored_model, self._optimizer, self.world.rank)

    def state_files(self) -> Iterator[StateFile]:
        return iter_state_files(self.state_slices(), self.world.rank, self.world.size)

    def state_metadata(self) -> dict[str, Any]:
        return {"shapes": self.train_module.stored_model.shapes(), "optimizer": self._optimizer_name}

    def load(self, checkpoint: CheckpointReader) -> str:
        model = self.train_module.stored_model
        return load_state(model, self._optimizer, checkpoint, self._optimizer_name, self.world)
