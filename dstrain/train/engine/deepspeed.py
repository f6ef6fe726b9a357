"""An engine takes the step: batches and a learning rate in, new weights and sums out.

`TorchEngine` is the definition, in plain PyTorch and one process. `DeepSpeedEngine` must equal it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import OptimConfig
from dstrain.distributed.collective_log import COLLECTIVE_LOG
from dstrain.distributed.world import SingleProcessWorld, World
from dstrain.errors import RunError, first_names
from dstrain.models.load import offload_activation_checkpoints
from dstrain.models.params.freeze import ParamGroup
from dstrain.models.zero3 import init_deepspeed
from dstrain.train.engine.module import (
    StepAccumulator,
    TrainModule,
    compute_step_stats,
    evaluate_batch,
    with_step_stats,
)
from dstrain.train.engine.optimizers import make_optimizer
from dstrain.train.engine.patches import patch_gradient_swapper
from dstrain.train.state.files import CheckpointReader, StateFile, iter_state_files
from dstrain.train.state.layout import StateSlice
from dstrain.train.state.load import get_stored_shapes, iter_state, load_state

COUNTERS = ("global_steps", "skipped_steps")
"""DeepSpeed's, that it goes on counting from."""


class EvalEngine(Protocol):
    """What an evaluation needs."""

    world: World

    def evaluate(self, batch: Batch) -> StepResult:
        """Sums over one batch, nothing learnt. Collective at stage 3."""

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        """What `evaluate` needs beside each batch, where the task surveys. Collective."""


class Engine(EvalEngine, Protocol):
    """What the loop needs."""

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One optimizer step over these micro-batches of this rank. Collective."""

    def state_slices(self) -> Iterator[list[StateSlice]]:
        """What this rank holds of weights and optimizer state; valid until the next is asked for."""

    def state_files(self) -> Iterator[StateFile]:
        """This rank's share of them, file by file."""

    def state_metadata(self) -> dict[str, Any]:
        """What belongs to them: names, whole shapes, counters."""

    def load(self, checkpoint: CheckpointReader) -> str:
        """Go on from what an engine of any kind, on any number of ranks, has told.

        Returns what begins anew, in a sentence; empty where nothing does. Collective.
        """


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout's random numbers are a function of seed, step and rank: nothing about them needs saving."""
    torch.manual_seed(zlib.crc32(f"{seed}/{step}/{rank}".encode()))


def _scale_loss_or_nan(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """The scaled loss; times nan where it is not finite, so that no gradient of it can look finite.

    An inf loss may have a finite gradient (-log sigmoid of -inf has 1): only the factor reaches it for sure.
    """
    return loss * torch.where(loss.detach().isfinite(), scale, torch.nan)


class TorchEngine:
    """Plain PyTorch in one process: what a step means."""

    def __init__(
        self, train_module: TrainModule, param_groups: Sequence[ParamGroup], optim: OptimConfig, device: torch.device
    ) -> None:
        self.world: World = SingleProcessWorld(device)
        self.train_module = train_module.to(device)
        self._lr_scales = [group.lr_scale for group in param_groups]
        self._optimizer = make_optimizer(param_groups, optim, None, device)
        self._max_grad_norm = optim.clip or math.inf
        self._optimizer_name = optim.name

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self.train_module.train()
        batches = with_step_stats(self.train_module, self.train_module.task, batches, self.world)
        weight, sums = _total_step_weight(batches, self.world), StepAccumulator()
        for batch in batches:
            total, metrics = self.train_module(batch.to(self.world.device))
            _scale_loss_or_nan(total, 1 / weight).backward()
            sums.add(total, metrics)
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self._max_grad_norm))
        applied = math.isfinite(norm)
        if applied:
            _set_lr(self._optimizer, self._lr_scales, lr)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sums.result(batches, grad_norm=norm, **_step_outcome(sums, batches, applied, self.world))

    def evaluate(self, batch: Batch) -> StepResult:
        return evaluate_batch(self.train_module, batch, self.world)

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        self.train_module.eval()
        return compute_step_stats(self.train_module, batches, self.world)

    def state_slices(self) -> Iterator[list[StateSlice]]:
        return iter_state(self.train_module, self._optimizer, self.world.rank)

    def state_files(self) -> Iterator[StateFile]:
        return iter_state_files(self.state_slices(), self.world.rank, self.world.size)

    def state_metadata(self) -> dict[str, Any]:
        return {"shapes": get_stored_shapes(self.train_module), "optimizer": self._optimizer_name}

    def load(self, checkpoint: CheckpointReader) -> str:
        return load_state(self.train_module, self._optimizer, checkpoint, self._optimizer_name, self.world)


class DeepSpeedEngine:
    """DeepSpeed at any ZeRO stage, taking the same step as TorchEngine."""

    def __init__(
        self,
        train_module: TrainModule,
        param_groups: Sequence[ParamGroup],
        optim: OptimConfig,
        ds_config: Mapping[str, Any],
        world: World,
    ) -> None:
        import deepspeed

        init_deepspeed()
        self.world, self.train_module = world, train_module
        self._lr_scales = [group.lr_scale for group in param_groups]
        self._optimizer_name = optim.name
        zero = ds_config["zero_optimization"]
        offload = zero.get("offload_optimizer", {}).get("device", "none")
        optimizer = make_optimizer(param_groups, optim, None if offload == "none" else offload, world.device)
        # Plain fp32 without ZeRO: DeepSpeed keeps no norm, writes inf and nan into the weights, and cannot clip
        # a gradient that was dropped. There the norm is taken and the gradient clipped here.
        self._max_grad_norm = (
            None if zero["stage"] or ds_config.get("bf16", {}).get("enabled") else optim.clip or math.inf
        )
        if ds_config.get("activation_checkpointing", {}).get("cpu_checkpointing"):
            offload_activation_checkpoints(train_module.model, pin_memory=world.device.type == "cuda")
        own = {**ds_config, "gradient_clipping": 0.0} if self._max_grad_norm else dict(ds_config)
        self.engine, *_ = deepspeed.initialize(model=train_module, optimizer=optimizer, config=own)
        if swapper := getattr(self.engine.optimizer, "optimizer_swapper", None):
            patch_gradient_swapper(swapper)
        if not zero["stage"]:
            # In bf16 DeepSpeed takes a step with zero gradients to make Adam's state, which then counts from 2:
            # the first real update would be 0.74 of what it should be (fp16/unfused_optimizer.py).
            optimizer.state.clear()

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self.engine.train()
        batches = with_step_stats(self.engine, self.train_module.task, batches, self.world)
        _set_lr(self.engine.optimizer, self._lr_scales, lr)
        # DeepSpeed averages gradients over the ranks: times their number, over the weight of the whole step.
        scale = self.world.size / _total_step_weight(batches, self.world)
        sums = StepAccumulator()
        norm = None
        for index, batch in enumerate(batches):
            COLLECTIVE_LOG.record_progress()
            total, metrics = self.engine(batch.to(self.world.device))
            # The product is a new tensor: the one the engine returned would be divided by the accumulation.
            self.engine.backward(_scale_loss_or_nan(total, scale), scale_wrt_gas=False)
            sums.add(total, metrics)
            if self._max_grad_norm and index == len(batches) - 1:
                norm = self._clip_grad_norm(self._max_grad_norm)
            self.engine.step()
        norm = norm if norm is not None else float(self.engine.get_global_grad_norm())
        applied = math.isfinite(norm) and self.engine.was_step_applied()
        return sums.result(batches, grad_norm=norm, **_step_outcome(sums, batches, applied, self.world))

    def evaluate(self, batch: Batch) -> StepResult:
        return evaluate_batch(self.engine, batch, self.world)

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        self.engine.eval()
        return compute_step_stats(self.engine, batches, self.world)

    def state_slices(self) -> Iterator[list[StateSlice]]:
        return iter_state(self.train_module, self.engine.optimizer, self.world.rank)

    def state_files(self) -> Iterator[StateFile]:
        return iter_state_files(self.state_slices(), self.world.rank, self.world.size)

    def state_metadata(self) -> dict[str, Any]:
        return {
            "shapes": get_stored_shapes(self.train_module),
            "optimizer": self._optimizer_name,
            "counters": {name: getattr(self.engine, name) for name in COUNTERS},
            "loss_scale": self._loss_scaler_state(),
        }

    def load(self, checkpoint: CheckpointReader) -> str:
        anew = load_state(self.train_module, self.engine.optimizer, checkpoint, self._optimizer_name, self.world)
        for name, value in checkpoint.metadata.get("counters", {}).items():
            setattr(self.engine, name, value)
        self.engine.micro_steps = self.engine.global_steps * self.engine.gradient_accumulation_steps()
        self.engine.global_samples = self.engine.global_steps * self.engine.train_batch_size()
        for name in self._loss_scaler_state():
            if name in checkpoint.metadata.get("loss_scale", {}):
                setattr(self.engine.optimizer.loss_scaler, name, checkpoint.metadata["loss_scale"][name])
        inner = getattr(self.engine.optimizer, "optimizer", None)
        if hasattr(inner, "ds_opt_adam"):
            _replay_bias_correction(inner)
        return anew

    def _loss_scaler_state(self) -> dict[str, float]:
        """Where the search for fp16's loss scale stands."""
        if not self.engine.fp16_enabled():
            return {}
        return {
            name: value
            for name, value in vars(self.engine.optimizer.loss_scaler).items()
            if type(value) in (int, float)
        }

    def _clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradient that is already summed over the ranks; drop it where it is not finite."""
        groups = self.engine.optimizer.param_groups
        learning = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(learning, max_norm))
        if not math.isfinite(norm):
            for parameter in learning:
                parameter.grad = None
        return norm


def _total_step_weight(batches: Sequence[Batch], world: World) -> float:
    """What the step's loss is divided by: the weight of all its batches on all ranks. Raises RunError unless above 0. Collective."""
    weight = world.sum([sum(batch.weight for batch in batches)])[0]
    if weight > 0 and math.isfinite(weight):
        return weight
    everyone = world.gather([sample for batch in batches if not batch.is_filler for sample in batch.samples])
    samples = sorted(sample for of_rank in everyone for sample in of_rank)
    named = first_names(samples, 16)
    raise RunError(
        f"the samples of one step, {named}, weigh {weight:g} together, and its loss is divided by that; leave out samples that "
        "hold nothing to learn, or raise batch.total"
    )


def _set_lr(optimizer: Any, scales: Sequence[float], lr: float) -> None:
    for group, scale in zip(optimizer.param_groups, scales, strict=True):
        group["lr"] = lr * scale


def _replay_bias_correction(adam: Any) -> None:
    """Bring CPUAdam's beta^t to the step that was loaded, multiplying as the unbroken run did.

    It lives outside the optimizer's state, as a running product in fp32; on a jump of the step CPUAdam takes a power
    instead, and a resumed run would differ in the last bit (deepspeed/ops/csrc/includes/cpu_adam.h, IncrementStep).
    """
    done = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    betas, eps = adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]
    nothing = [torch.zeros(1) for _ in range(4)]
    for step in range(1, done + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *betas, eps, 0.0, True, *nothing)


def _step_outcome(
    accumulator: StepAccumulator, batches: Sequence[Batch], is_applied: bool, world: World
) -> dict[str, Any]:
    """Whether the step was taken, and where not, the samples with a loss that is not finite; of the whole step if none.

    Collective where the step was left out, which every rank knows alike.
    """
    if is_applied:
        return {"applied": True}
    bad = [not math.isfinite(float(loss)) for loss in accumulator.losses]
    everyone = world.gather(
        ([b.samples for b, is_bad in zip(batches, bad, strict=True) if is_bad], [b.samples for b in batches])
    )
    named = [ids for of_rank, _ in everyone for ids in of_rank]
    suspects = named or [ids for _, of_rank in everyone for ids in of_rank]
    return {
        "applied": False,
        "loss_is_finite": not named,
        "suspects": tuple(sorted(sample for ids in suspects for sample in ids)),
    }
