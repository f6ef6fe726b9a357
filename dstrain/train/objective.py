"""The task and its model as modules, so that every forward pass goes through an engine, and the sums they leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.tasks import Task
from dstrain.world import World

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Reference(torch.nn.Module):
    """The model that a loss compares with. It never learns, and is always in evaluation mode."""

    def __init__(self, task: Task, model: torch.nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Reference:
        return super().train(False)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Column -> (B, …), what the task asks of its reference."""
        return self.task.refer(self.model, batch)


class Objective(torch.nn.Module):
    """The task and its model as one module; the reference beside it where one is held in memory."""

    def __init__(self, task: Task, model: torch.nn.Module, reference: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.task, self.model = task, model
        self.reference = None if reference is None else Reference(task, reference)

    @property
    def adapted(self) -> bool:
        """Whether adapters learn on a frozen base, which checkpoints then leave out."""
        return self.task.recipe.model.lora is not None

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Metrics]:
        """(scalar sum of the loss, name -> (sum, weight)); a filler's are all zero."""
        loss = self.task.loss(self.model, batch.plus(self._refer(batch)))
        share = 0.0 if batch.filler else 1.0
        metrics = {}
        for name, value in loss.metrics.items():
            total, weight = value if isinstance(value, tuple) else (value, batch.weight)
            weight = torch.as_tensor(weight, dtype=torch.float32, device=total.device)
            metrics[name] = (total.detach().float() * share, weight.detach() * share)
        return loss.total.float() * share, metrics

    def _refer(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        if self.reference is not None:
            return self.reference(batch)
        if self.task.reference != "adapter":
            return {}
        training, model = self.model.training, self.model
        model.eval()
        with torch.no_grad(), model.disable_adapter():
            found = self.task.refer(model, batch)
        model.train(training)
        return found

    @contextmanager
    def without_reference(self) -> Iterator[None]:
        """Inside, the reference is no part of the module: it is never saved."""
        reference, self.reference = self.reference, None
        try:
            yield
        finally:
            self.reference = reference


class Sums:
    """Adds up what forward passes return, on the device."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.metrics: Metrics = {}

    def add(self, total: torch.Tensor, metrics: Metrics) -> None:
        self.losses.append(total.detach())
        for name, (value, weight) in metrics.items():
            old_value, old_weight = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (old_value + value, old_weight + weight)

    def result(self, batches: Sequence[Batch], **more: Any) -> StepResult:
        return StepResult(
            loss=torch.stack(self.losses).sum(),
            weight=sum(batch.weight for batch in batches),
            metrics=self.metrics,
            samples=sum(len(batch.samples) for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            **more,
        )


@torch.no_grad()
def look_at(module: torch.nn.Module, batch: Batch, world: World) -> StepResult:
    """Sums over one batch in evaluation mode; `module` is an objective, or an engine around one."""
    module.eval()
    sums = Sums()
    sums.add(*module(batch.to(world.device)))
    return sums.result([batch])
