"""The task and its model as modules, so that every forward pass goes through an engine, and the sums they leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dstrain.batch import Batch, StepResult, on_host
from dstrain.distributed.world import World
from dstrain.models.adapters.lora import adapters_disabled
from dstrain.tasks import Task

Metrics = dict[str, tuple[torch.Tensor, torch.Tensor | float]]
"""Name -> (sum, weight). A weight that the host knows stays a number: a copy of it to a GPU would wait for the GPU."""


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
        self.trainable = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        """Parameters of the model that are trained. Decided here, once: `requires_grad` may be changed later by a library."""

    @property
    def adapted(self) -> bool:
        """Whether adapters learn on a frozen base, which checkpoints then leave out."""
        return self.task.recipe.model.lora is not None

    def forward(self, batch: Batch, survey: bool = False) -> tuple[Any, Metrics]:
        """(scalar sum of the loss, name -> (sum, weight)); a filler's are all zero.

        For a `survey`: (what the reference says of the batch, name -> (sum, weight)).
        """
        if survey:
            answers = self._refer(batch)
            return answers, _weighed(self.task.survey(self.model, batch.plus(answers)), batch)
        answers = {} if self.task.surveys else self._refer(batch)  # the survey has asked already
        loss = self.task.loss(self.model, batch.plus(answers))
        return loss.total.float() * _share(batch), _weighed(loss.metrics, batch)

    def _refer(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        if self.reference is not None:
            return self.reference(batch)
        if self.task.reference != "adapter":
            return {}
        training, model = self.model.training, self.model
        model.eval()
        with torch.no_grad(), adapters_disabled(model):
            found = self.task.refer(model, batch)
        model.train(training)
        return found


def _share(batch: Batch) -> float:
    return 0.0 if batch.filler else 1.0


def _weighed(sums: Mapping[str, Any], batch: Batch) -> Metrics:
    """Every sum with its weight, the batch's where it has none of its own."""
    found: Metrics = {}
    share = _share(batch)
    for name, value in sums.items():
        total, weight = value if isinstance(value, tuple) else (value, batch.weight)
        weight = weight.detach().float() if isinstance(weight, torch.Tensor) else float(weight)
        found[name] = (total.detach().float() * share, weight * share)
    return found


class Sums:
    """Adds up what forward passes return: tensors on their device, numbers on the host."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.metrics: Metrics = {}

    def add(self, total: torch.Tensor, metrics: Metrics) -> None:
        self.losses.append(total.detach())
        self.add_metrics(metrics)

    def add_metrics(self, metrics: Metrics) -> None:
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


@torch.no_grad()
def survey(module: torch.nn.Module, batches: Iterable[Batch], world: World) -> list[Mapping[str, torch.Tensor]]:
    """What each batch is given before its loss: its reference's answers, and the task's means over all batches of all ranks.

    `module` is an objective whose task surveys, or an engine around one. Collective.
    """
    told, sums = [], Sums()
    for batch in batches:
        answers, totals = module(batch.to(world.device), survey=True)
        told.append(answers)
        sums.add_metrics(totals)
    of_all = world.sum(on_host([value for name in sorted(sums.metrics) for value in sums.metrics[name]]))
    means = torch.tensor([total / (weight or 1) for total, weight in zip(of_all[::2], of_all[1::2], strict=True)])
    found = dict(zip(sorted(sums.metrics), means.to(world.device), strict=True))
    return [{**answers, **found} for answers in told]


def surveyed(module: torch.nn.Module, task: Task, batches: Sequence[Batch], world: World) -> Sequence[Batch]:
    """The batches of a step, each with what the task must know of all of them. Collective where the task surveys."""
    if not task.surveys:
        return batches
    return [batch.plus(more) for batch, more in zip(batches, survey(module, batches, world), strict=True)]
