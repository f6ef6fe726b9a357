"""The task and its model as modules, so that every forward pass goes through an engine, and the sums they leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dstrain.batch import Batch, StepResult, to_floats
from dstrain.distributed.world import World
from dstrain.models.adapters.lora import adapters_disabled
from dstrain.tasks import Task
from dstrain.train.state.load import StoredModel

MetricSums = dict[str, tuple[torch.Tensor, torch.Tensor | float]]
"""Name -> (sum, weight). A weight that the host knows stays a number: a copy of it to a GPU would wait for the GPU."""


class ReferenceModel(torch.nn.Module):
    """The model that a loss compares with. It never learns, and is always in evaluation mode."""

    def __init__(self, task: Task, model: torch.nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> ReferenceModel:
        return super().train(False)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Column -> (B, …), what the task asks of its reference."""
        return self.task.loss_inputs.reference.outputs(self.model, batch)


class TrainModule(torch.nn.Module):
    """The task and its model as one module; the reference beside it where one is held in memory."""

    def __init__(self, task: Task, model: torch.nn.Module, reference: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.task, self.model = task, model
        self.reference_model = None if reference is None else ReferenceModel(task, reference)
        self.trainable_names = frozenset(
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        )
        """Parameters of the model that are trained. Decided here, once: `requires_grad` may be changed later by a library."""

    @property
    def stored_model(self) -> StoredModel:
        """The model, and which of its parameters checkpoints hold: with LoRA the frozen base is left out."""
        return StoredModel(self.model, self.trainable_names, self.task.recipe.model.lora is not None)

    def forward(self, batch: Batch, stats_only: bool = False) -> tuple[Any, MetricSums]:
        """(scalar sum of the loss, name -> (sum, weight)); a filler's are all zero.

        For a `survey`: (what the reference says of the batch, name -> (sum, weight)).
        """
        if stats_only:
            answers = self._reference_outputs(batch)
            step_stats = self.task.loss_inputs.step_stats
            assert step_stats is not None, "only asked of a task that needs them"
            return answers, _with_weights(step_stats(self.model, batch.with_tensors(answers)), batch)
        answers = (
            {} if self.task.loss_inputs.step_stats else self._reference_outputs(batch)
        )  # the survey has asked already
        loss = self.task.loss(self.model, batch.with_tensors(answers))
        return loss.total.float() * _batch_factor(batch), _with_weights(loss.metrics, batch)

    def _reference_outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        if self.reference_model is not None:
            return self.reference_model(batch)
        if self.task.loss_inputs.reference.kind != "adapter":
            return {}
        training, model = self.model.training, self.model
        model.eval()
        with torch.no_grad(), adapters_disabled(model):
            found = self.task.loss_inputs.reference.outputs(model, batch)
        model.train(training)
        return found


def _batch_factor(batch: Batch) -> float:
    return 0.0 if batch.is_filler else 1.0


def _with_weights(sums: Mapping[str, Any], batch: Batch) -> MetricSums:
    """Every sum with its weight, the batch's where it has none of its own."""
    found: MetricSums = {}
    share = _batch_factor(batch)
    for name, value in sums.items():
        total, weight = value if isinstance(value, tuple) else (value, batch.weight)
        weight = weight.detach().float() if isinstance(weight, torch.Tensor) else float(weight)
        found[name] = (total.detach().float() * share, weight * share)
    return found


class StepAccumulator:
    """Adds up what forward passes return: tensors on their device, numbers on the host."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.metrics: MetricSums = {}

    def add(self, loss: torch.Tensor, metrics: MetricSums) -> None:
        self.losses.append(loss.detach())
        self.add_metrics(metrics)

    def add_metrics(self, metrics: MetricSums) -> None:
        for name, (value, weight) in metrics.items():
            old_value, old_weight = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (old_value + value, old_weight + weight)

    def result(self, batches: Sequence[Batch], **fields: Any) -> StepResult:
        return StepResult(
            loss=torch.stack(self.losses).sum(),
            weight=sum(batch.weight for batch in batches),
            metrics=self.metrics,
            samples=sum(len(batch.samples) for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            **fields,
        )


@torch.no_grad()
def evaluate_batch(module: torch.nn.Module, batch: Batch, world: World) -> StepResult:
    """Sums over one batch in evaluation mode; `module` is an objective, or an engine around one."""
    module.eval()
    sums = StepAccumulator()
    sums.add(*module(batch.to(world.device)))
    return sums.result([batch])


@torch.no_grad()
def compute_step_stats(
    module: torch.nn.Module, batches: Iterable[Batch], world: World
) -> list[Mapping[str, torch.Tensor]]:
    """What each batch is given before its loss: its reference's answers, and the task's means over all batches of all ranks.

    `module` is an objective whose task surveys, or an engine around one. Collective.
    """
    told, sums = [], StepAccumulator()
    for batch in batches:
        answers, totals = module(batch.to(world.device), stats_only=True)
        told.append(answers)
        sums.add_metrics(totals)
    of_all = world.sum(to_floats([value for name in sorted(sums.metrics) for value in sums.metrics[name]]))
    means = torch.tensor([total / (weight or 1) for total, weight in zip(of_all[::2], of_all[1::2], strict=True)])
    found = dict(zip(sorted(sums.metrics), means.to(world.device), strict=True))
    return [{**answers, **found} for answers in told]


def with_step_stats(module: torch.nn.Module, task: Task, batches: Sequence[Batch], world: World) -> Sequence[Batch]:
    """The batches of a step, each with what the task must know of all of them. Collective where the task surveys."""
    if task.loss_inputs.step_stats is None:
        return batches
    return [
        batch.with_tensors(more)
        for batch, more in zip(batches, compute_step_stats(module, batches, world), strict=True)
    ]
