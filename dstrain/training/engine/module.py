"""What engines share: task and models as one torch module, sums and outcome of a step."""

# Shapes: B rows; a column of a batch is (B, ...). A loss is a sum over the rows; its weight divides it once per step.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import torch

from dstrain.batch import Batch, StepResult
from dstrain.device_copies import copy_to_device, to_floats
from dstrain.distributed.world import World
from dstrain.errors import RunError, first_names
from dstrain.models.adapters import use_reference
from dstrain.models.params import unwrap_peft
from dstrain.models.router_loss import METRIC, RouterLoss, router_loss_coefficient
from dstrain.tasks import Task
from dstrain.tasks.common.task import FrozenModel, Loss, LossInputs
from dstrain.training.state.engine_state import StoredModel

TASK_LOSS = "task_loss"
"""Among the metrics of a forward pass: the loss without the routers', where its total has theirs."""
MAX_SAMPLES = 16
"""Sample ids that an error lists."""
OPTIMIZER_UPDATE = "the optimizer's update"
"""Activity after the last backward pass: weights and optimizer state may be partly updated."""
MetricSums = dict[str, tuple[torch.Tensor, torch.Tensor | float]]
"""Name -> (sum, weight). A weight known on the host stays a number: copying it to the GPU would wait for the GPU."""


class FrozenModule(torch.nn.Module):
    """Frozen model whose outputs a loss reads; always in evaluation mode."""

    def __init__(self, frozen: FrozenModel, model: torch.nn.Module) -> None:
        super().__init__()
        self._outputs, self.model = frozen.outputs, model.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> FrozenModule:
        # A frozen model is a submodule, so `train()` of the whole reaches it; dropout would make its outputs random.
        return super().train(False)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return column -> (B, …): the model's outputs."""
        return self._outputs(self.model, batch)


class NoisyEmbeddings:
    """NEFTune (Jain et al., arXiv 2310.05914, algorithm 1): uniform noise on token embeddings, in training alone.

    A sequence of L tokens with embeddings of width d gets noise of at most alpha / sqrt(L d), as in transformers'
    `neftune_post_forward_hook`, which takes the length of the padded row for L. Here L does not count padding, so that
    the noise does not depend on the other samples of a micro-batch.
    """

    def __init__(self, model: Any, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: torch.Tensor | None = None
        model.get_input_embeddings().register_forward_hook(self._add_noise)

    @contextmanager
    def in_batch(self, batch: Batch) -> Iterator[None]:
        """Add noise to the embeddings of this batch inside the context."""
        self._lengths = _sequence_lengths(batch)
        yield
        self._lengths = None

    def _add_noise(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training or self._lengths is None:
            return output
        limit = self.alpha / (self._lengths * output.shape[-1]).sqrt()  # (B, L or 1)
        return output + torch.empty_like(output).uniform_(-1, 1) * limit[..., None].to(output.dtype)


def _sequence_lengths(batch: Batch) -> torch.Tensor:
    """Return the tokens of each token's sequence, (1, T), or of each padded row, (B, 1); float32.

    A prefix that several sequences share has the length of the longest of them.
    """
    ids = batch.tensors["input_ids"]
    if not batch.is_packed:
        return batch.tensors["attention_mask"].sum(-1, keepdim=True).float()
    lengths, counts = list[int](), list[int]()
    for group in batch.groups:
        lengths += [group.prefix + branch for branch in (max(group.branches), *group.branches)]
        counts += [group.prefix, *group.branches]
    return copy_to_device(np.repeat(lengths, counts).astype(np.float32), ids.device)[None]


class TrainModule(torch.nn.Module):
    """Task and model as one module, with the frozen models that the task needs in memory."""

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        reference: torch.nn.Module | None = None,
        reward_models: Sequence[torch.nn.Module] = (),
        judge: FrozenModule | None = None,
    ) -> None:
        """`reward_models`: those of the task's scorers that are not cached, in their order."""
        super().__init__()
        self.task, self.model, self.loss_inputs = task, model, task.loss_inputs
        # For the task's functions. Not a submodule too: names of weights would change, and DeepSpeed find them twice.
        self.__dict__["unwrapped_model"] = unwrap_peft(model)
        inputs = self.loss_inputs
        self.reference_model = None if reference is None else FrozenModule(inputs.reference, reference)
        online = [scorer for scorer in inputs.scorers if not scorer.is_cached] if reward_models else []
        self.reward_models = torch.nn.ModuleList(map(FrozenModule, online, reward_models))
        self.judge = judge
        """The reward model of generated answers, which no loss reads (eval.generate.reward_model)."""
        coefficient = router_loss_coefficient_of(self.unwrapped_model, task)
        self.router_loss = RouterLoss(self.unwrapped_model, coefficient) if coefficient else None
        alpha = task.recipe.model.neftune_noise_alpha
        self.noise = None if alpha is None else NoisyEmbeddings(self.unwrapped_model, alpha)
        self.trainable_names = frozenset(
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        )
        """Names of trained parameters, taken once: libraries such as peft may change `requires_grad` later."""

    unwrapped_model: torch.nn.Module
    """The model, or the one inside of peft's wrapper, which has the same layers."""

    @property
    def stored_model(self) -> StoredModel:
        """The model, and which of its parameters checkpoints hold: with LoRA the frozen base is left out."""
        return StoredModel(self.model, self.trainable_names, self.task.recipe.model.lora is not None)

    def forward(self, batch: Batch, only: Literal["stats", "scores"] | None = None) -> tuple[Any, MetricSums]:
        """Return (scalar sum of the loss, name -> (sum, weight)); all zero for a filler batch.

        A sum with the routers' loss in it comes with the task's own, TASK_LOSS, which is that of metrics and evaluations.
        With `only="scores"` return (the reward models' scores of the batch, nothing); with `only="stats"`
        (the batch's reference outputs, name -> (sum, weight)) of the task's step statistics.
        """
        if only == "scores":
            return {name: column for model in self.reward_models for name, column in model(batch).items()}, {}
        if only == "stats":
            answers = self._reference_outputs(batch)
            step_stats = self.loss_inputs.step_stats
            assert step_stats is not None, "only asked of a task that needs them"
            return answers, _with_weights(step_stats(self.unwrapped_model, batch.with_tensors(answers)), batch)
        answers = {} if self.loss_inputs.step_stats else self._reference_outputs(batch)  # already in the batch
        router_losses: list[torch.Tensor] = []
        with ExitStack() as stack:
            if self.router_loss is not None:
                router_losses = stack.enter_context(self.router_loss.collect(batch.dummy_rows))
            if self.noise is not None:
                stack.enter_context(self.noise.in_batch(batch))
            loss = self.task.loss(self.unwrapped_model, batch.with_tensors(answers))
        if self.router_loss is not None and router_losses:
            # A mean over tokens: times the weight, so that the step's division by the weight gives a mean again.
            auxiliary = torch.stack(router_losses).mean().float() * batch.weight
            total = loss.total.float() + self.router_loss.coefficient * auxiliary
            loss = Loss(total, {**loss.metrics, METRIC: auxiliary.detach(), TASK_LOSS: loss.total.detach()})
        # Times 0 instead of no loss: every rank must take part in the collectives of both passes.
        return loss.total.float() * _batch_factor(batch), _with_weights(loss.metrics, batch)

    def _reference_outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        if self.reference_model is not None:
            return self.reference_model(batch)
        if self.loss_inputs.reference.kind != "adapter":
            return {}
        training, model = self.model.training, self.model
        # Dropout would make the reference random.
        model.eval()
        with torch.no_grad(), use_reference(model):
            found = self.loss_inputs.reference.outputs(self.unwrapped_model, batch)
        model.train(training)
        return found


def router_loss_coefficient_of(model: torch.nn.Module, task: Task) -> float:
    """Return the factor of the router's loss of a transformers model; 0 for others."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return 0.0
    return router_loss_coefficient(config, task.recipe.model.router_aux_loss_coef)


def _batch_factor(batch: Batch) -> float:
    """Return the part of the batch's sums that this process counts."""
    if batch.is_filler:
        return 0.0
    return 1.0 if batch.sequence is None else 1.0 / batch.sequence.size


def _with_weights(sums: Mapping[str, Any], batch: Batch) -> MetricSums:
    """Return every sum with its weight; the batch's weight where the task gives none."""
    found: MetricSums = {}
    share = _batch_factor(batch)
    for name, value in sums.items():
        total, weight = value if isinstance(value, tuple) else (value, batch.weight)
        weight = weight.detach().float() if isinstance(weight, torch.Tensor) else float(weight)
        if isinstance(value, tuple):  # the batch's own weight is a part already
            weight = weight * share
        found[name] = (total.detach().float() * share, weight)
    return found


def describe_pass(name: str, index: int, batches: Sequence[Batch]) -> str:
    """Return `the backward pass of micro-batch 2 of 4 (8 samples, 4096 tokens)`."""
    batch = batches[index]
    size = f"{len(batch.samples)} samples, {batch.tokens} tokens"
    return f"the {name} pass of micro-batch {index + 1} of {len(batches)} ({size})"


class StepAccumulator:
    """Sum of the results of forward passes: tensors on their device, numbers on the host."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        """Sums that the backward passes start from."""
        self.task_losses: list[torch.Tensor] = []
        self.metrics: MetricSums = {}

    def add(self, loss: torch.Tensor, metrics: MetricSums) -> None:
        named = dict(metrics)
        task_loss, _ = named.pop(TASK_LOSS, (loss.detach(), None))
        self.losses.append(loss.detach())
        self.task_losses.append(task_loss)
        self.add_metrics(named)

    def add_metrics(self, metrics: MetricSums) -> None:
        for name, (value, weight) in metrics.items():
            old_value, old_weight = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (old_value + value, old_weight + weight)

    def result(self, batches: Sequence[Batch], **fields: Any) -> StepResult:
        return StepResult(
            loss=torch.stack(self.task_losses).sum(),
            weight=sum(batch.weight for batch in batches),
            metrics=self.metrics,
            micro_batches=len(batches),
            samples=sum(len(batch.samples) for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            computed_tokens=sum(map(_count_computed, batches)),
            padding_tokens=sum(map(_count_padding, batches)),
            **fields,
        )


def _count_computed(batch: Batch) -> int:
    """Return the tokens of a forward pass, padding included; 0 for a task without `input_ids`."""
    ids = batch.tensors.get("input_ids")
    if ids is None:
        return 0
    return ids.numel() if batch.sequence is None else ids.numel() // batch.sequence.size


def _count_padding(batch: Batch) -> int:
    """Return the tokens that are computed for nothing: padding, and all of a filler."""
    # `tokens` counts a shared prefix once per sequence: it may be above those of a packed batch, which has no padding.
    return max(_count_computed(batch) - batch.tokens, 0)


@torch.no_grad()
def with_scores(module: torch.nn.Module, batches: Sequence[Batch], world: World) -> Sequence[Batch]:
    """Return the batches with the scores of the reward models in memory, and with the weights that follow from them.

    `module` is a TrainModule, or an engine around one. Without such reward models the batches are returned as they are.
    """
    train_module = getattr(module, "module", module)
    if not len(getattr(train_module, "reward_models", ())):
        return batches
    scored = [batch.with_tensors(module(batch.to(world.device), only="scores")[0]) for batch in batches]
    update_weight = train_module.loss_inputs.update_weight
    return scored if update_weight is None else [batch if batch.is_filler else update_weight(batch) for batch in scored]


@torch.no_grad()
def compute_step_stats(
    module: torch.nn.Module, batches: Iterable[Batch], world: World
) -> list[Mapping[str, torch.Tensor]]:
    """Return for each batch its reference outputs and the task's means over all batches of all ranks. Collective.

    `module` is a TrainModule whose task has step statistics, or an engine around one. The means are scalars.
    """
    outputs, sums = [], StepAccumulator()
    for batch in batches:
        answers, totals = module(batch.to(world.device), only="stats")
        outputs.append(answers)
        sums.add_metrics(totals)
    # By sorted name: the ranks add by position.
    global_sums = world.sum(to_floats([value for name in sorted(sums.metrics) for value in sums.metrics[name]]))
    # Weight 0: no rank had anything to average.
    means = [total / (weight or 1) for total, weight in zip(global_sums[::2], global_sums[1::2], strict=True)]
    on_device = copy_to_device(np.array(means, dtype=np.float32), world.device)
    named_means = dict(zip(sorted(sums.metrics), on_device, strict=True))
    return [{**answers, **named_means} for answers in outputs]


def with_step_stats(
    module: torch.nn.Module, loss_inputs: LossInputs, batches: Sequence[Batch], world: World
) -> Sequence[Batch]:
    """Return the batches with the columns of `compute_step_stats`, if the task needs them. Collective if it does."""
    if loss_inputs.step_stats is None:
        return batches
    return [
        batch.with_tensors(more)
        for batch, more in zip(batches, compute_step_stats(module, batches, world), strict=True)
    ]


def scale_loss_or_nan(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scaled scalar loss; nan if it is not finite, so that its gradient cannot be finite.

    An inf loss may have a finite gradient (that of -log sigmoid at -inf is 1): only the factor reaches every gradient.
    """
    return loss * torch.where(loss.detach().isfinite(), scale, torch.nan)


def total_step_weight(
    batches: Sequence[Batch], world: World, loss_inputs: LossInputs, known: float | None = None
) -> float:
    """Return the weight of all batches of the step on all ranks, by which the loss is divided. Collective.

    `known`: that weight, where the ranks have already summed it. Raises RunError unless it is finite and above 0. Where scores gave every sample the weight 0, the loss is 0, and
    this returns 1.
    """
    # Counted on the host and summed over gloo: reading it from a GPU would wait for the GPU.
    weight = world.sum([sum(batch.weight for batch in batches)])[0] if known is None else known
    if weight == 0 and loss_inputs.update_weight is not None:
        return 1.0
    if weight > 0 and math.isfinite(weight):
        return weight
    fault = f"have a total weight of {weight:g}, by which the loss is divided"
    fix = "leave out samples without a token to train on, or raise batch.total"
    if math.isnan(weight) and loss_inputs.update_weight is not None:
        fault, fix = "have scores of a reward model that are not finite", "check its weights and precision"
    per_rank = world.gather([sample for batch in batches if not batch.is_filler for sample in batch.samples])
    samples = sorted(sample for of_rank in per_rank for sample in of_rank)
    raise RunError(f"the samples of one step, {first_names(samples, MAX_SAMPLES)}, {fault}; {fix}")


def set_lr(optimizer: Any, scales: Sequence[float], lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times the group's scale."""
    for group, scale in zip(optimizer.param_groups, scales, strict=True):
        group["lr"] = lr * scale


def step_outcome(
    accumulator: StepAccumulator, batches: Sequence[Batch], is_applied: bool, world: World
) -> dict[str, Any]:
    """Return the fields of a StepResult that tell whether the step was applied.

    Of a step that was not applied, `suspects` are the samples of the batches with a loss that is not finite; if all
    losses are finite, all samples of the step. Collective if the step was not applied, which every rank decides alike.
    """
    if is_applied:
        return {"applied": True}
    # float() waits for the GPU, so only here, for a step that was not applied.
    is_bad = [not math.isfinite(float(loss)) for loss in accumulator.losses]
    per_rank = world.gather(
        ([batch.samples for batch, bad in zip(batches, is_bad, strict=True) if bad], [b.samples for b in batches])
    )
    with_bad_loss = [samples for bad, _ in per_rank for samples in bad]
    suspects = with_bad_loss or [samples for _, every in per_rank for samples in every]
    return {
        "applied": False,
        "loss_is_finite": not with_bad_loss,
        "suspects": tuple(sorted(sample for samples in suspects for sample in samples)),
    }
