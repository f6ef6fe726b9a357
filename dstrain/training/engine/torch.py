"""Engine in plain PyTorch and one process, which defines what a training step is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import OptimConfig
from dstrain.distributed.world import SingleProcessWorld, World
from dstrain.models.params import ParamGroup
from dstrain.training.engine.base import Engine
from dstrain.training.engine.module import (
    OPTIMIZER_UPDATE,
    StepAccumulator,
    TrainModule,
    describe_pass,
    scale_loss_or_nan,
    set_lr,
    step_outcome,
)
from dstrain.training.engine.optimizers import make_optimizer


class TorchEngine(Engine):
    """Reference implementation of a step; tests compare DeepSpeedEngine with it."""

    is_sharded = False

    def __init__(
        self, train_module: TrainModule, param_groups: Sequence[ParamGroup], optim: OptimConfig, device: torch.device
    ) -> None:
        super().__init__(train_module.to(device), param_groups, optim)
        self.world: World = SingleProcessWorld(device)
        self.module = train_module
        self._optimizer = make_optimizer(param_groups, optim, None, device)
        # inf: the norm is computed, and nothing is clipped.
        self._max_grad_norm = optim.clip or math.inf

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, batches: Sequence[Batch], lr: float, weight: float | None = None) -> StepResult:
        batches, weight = self._prepare_step(batches, weight)
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
