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
from dstrain.distributed.collective_log import LEDGER
from dstrain.distributed.world import SoloWorld, World
from dstrain.errors import RunError
from dstrain.models.load import keep_checkpoints_on_host
from dstrain.models.params.freeze import Group
from dstrain.models.zero3 import start_deepspeed
from dstrain.train.engine.module import Objective, Sums, look_at, survey, surveyed
from dstrain.train.engine.optimizers import make_optimizer
from dstrain.train.engine.patches import keep_misaligned_gradients
from dstrain.train.state.files import Shard, StoredState, take
from dstrain.train.state.layout import Part
from dstrain.train.state.load import held, load_state, stored_shapes

COUNTERS = ("global_steps", "skipped_steps")
"""DeepSpeed's, that it goes on counting from."""


class Looks(Protocol):
    """What an evaluation needs."""

    world: World

    def evaluate(self, batch: Batch) -> StepResult:
        """Sums over one batch, nothing learnt. Collective at stage 3."""

    def survey(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        """What `evaluate` needs beside each batch, where the task surveys. Collective."""


class Engine(Looks, Protocol):
    """What the loop needs."""

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """One optimizer step over these micro-batches of this rank. Collective."""

    def parts(self) -> Iterator[list[Part]]:
        """What this rank holds of weights and optimizer state; valid until the next is asked for."""

    def shards(self) -> Iterator[Shard]:
        """This rank's share of them, file by file."""

    def about(self) -> dict[str, Any]:
        """What belongs to them: names, whole shapes, counters."""

    def load(self, stored: StoredState) -> str:
        """Go on from what an engine of any kind, on any number of ranks, has told.

        Returns what begins anew, in a sentence; empty where nothing does. Collective.
        """


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout's random numbers are a function of seed, step and rank: nothing about them needs saving."""
    torch.manual_seed(zlib.crc32(f"{seed}/{step}/{rank}".encode()))


def _poisoned(total: torch.Tensor, scale: float) -> torch.Tensor:
    """The scaled loss; times nan where it is not finite, so that no gradient of it can look finite.

    An inf loss may have a finite gradient (-log sigmoid of -inf has 1): only the factor reaches it for sure.
    """
    return total * torch.where(total.detach().isfinite(), scale, torch.nan)


class TorchEngine:
    """Plain PyTorch in one process: what a step means."""

    def __init__(self, objective: Objective, groups: Sequence[Group], optim: OptimConfig, device: torch.device) -> None:
        self.world: World = SoloWorld(device)
        self.objective = objective.to(device)
        self._scales = [group.lr_scale for group in groups]
        self._optimizer = make_optimizer(groups, optim, None, device)
        self._clip = optim.clip or math.inf
        self._name = optim.name

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self.objective.train()
        batches = surveyed(self.objective, self.objective.task, batches, self.world)
        weight, sums = _weight_of_step(batches, self.world), Sums()
        for batch in batches:
            total, metrics = self.objective(batch.to(self.world.device))
            _poisoned(total, 1 / weight).backward()
            sums.add(total, metrics)
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self._clip))
        applied = math.isfinite(norm)
        if applied:
            _set_lr(self._optimizer, self._scales, lr)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sums.result(batches, grad_norm=norm, **_verdict(sums, batches, applied, self.world))

    def evaluate(self, batch: Batch) -> StepResult:
        return look_at(self.objective, batch, self.world)

    def survey(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        self.objective.eval()
        return survey(self.objective, batches, self.world)

    def parts(self) -> Iterator[list[Part]]:
        return held(self.objective, self._optimizer, self.world.rank)

    def shards(self) -> Iterator[Shard]:
        return take(self.parts(), self.world.rank, self.world.size)

    def about(self) -> dict[str, Any]:
        return {"shapes": stored_shapes(self.objective), "optimizer": self._name}

    def load(self, stored: StoredState) -> str:
        return load_state(self.objective, self._optimizer, stored, self._name, self.world)


class DeepSpeedEngine:
    """DeepSpeed at any ZeRO stage, taking the same step as TorchEngine."""

    def __init__(
        self, objective: Objective, groups: Sequence[Group], optim: OptimConfig, config: Mapping[str, Any], world: World
    ) -> None:
        import deepspeed

        start_deepspeed()
        self.world, self.objective = world, objective
        self._scales = [group.lr_scale for group in groups]
        self._name = optim.name
        zero = config["zero_optimization"]
        offload = zero.get("offload_optimizer", {}).get("device", "none")
        optimizer = make_optimizer(groups, optim, None if offload == "none" else offload, world.device)
        # Plain fp32 without ZeRO: DeepSpeed keeps no norm, writes inf and nan into the weights, and cannot clip
        # a gradient that was dropped. There the norm is taken and the gradient clipped here.
        self._clip = None if zero["stage"] or config.get("bf16", {}).get("enabled") else optim.clip or math.inf
        if config.get("activation_checkpointing", {}).get("cpu_checkpointing"):
            keep_checkpoints_on_host(objective.model, pin=world.device.type == "cuda")
        own = {**config, "gradient_clipping": 0.0} if self._clip else dict(config)
        self.engine, *_ = deepspeed.initialize(model=objective, optimizer=optimizer, config=own)
        if swapper := getattr(self.engine.optimizer, "optimizer_swapper", None):
            keep_misaligned_gradients(swapper)
        if not zero["stage"]:
            # In bf16 DeepSpeed takes a step with zero gradients to make Adam's state, which then counts from 2:
            # the first real update would be 0.74 of what it should be (fp16/unfused_optimizer.py).
            optimizer.state.clear()

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self.engine.train()
        batches = surveyed(self.engine, self.objective.task, batches, self.world)
        _set_lr(self.engine.optimizer, self._scales, lr)
        # DeepSpeed averages gradients over the ranks: times their number, over the weight of the whole step.
        scale = self.world.size / _weight_of_step(batches, self.world)
        sums = Sums()
        norm = None
        for index, batch in enumerate(batches):
            LEDGER.mark()
            total, metrics = self.engine(batch.to(self.world.device))
            # The product is a new tensor: the one the engine returned would be divided by the accumulation.
            self.engine.backward(_poisoned(total, scale), scale_wrt_gas=False)
            sums.add(total, metrics)
            if self._clip and index == len(batches) - 1:
                norm = self._clip_whole_gradient(self._clip)
            self.engine.step()
        norm = norm if norm is not None else float(self.engine.get_global_grad_norm())
        applied = math.isfinite(norm) and self.engine.was_step_applied()
        return sums.result(batches, grad_norm=norm, **_verdict(sums, batches, applied, self.world))

    def evaluate(self, batch: Batch) -> StepResult:
        return look_at(self.engine, batch, self.world)

    def survey(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        self.engine.eval()
        return survey(self.engine, batches, self.world)

    def parts(self) -> Iterator[list[Part]]:
        return held(self.objective, self.engine.optimizer, self.world.rank)

    def shards(self) -> Iterator[Shard]:
        return take(self.parts(), self.world.rank, self.world.size)

    def about(self) -> dict[str, Any]:
        return {
            "shapes": stored_shapes(self.objective),
            "optimizer": self._name,
            "counters": {name: getattr(self.engine, name) for name in COUNTERS},
            "loss_scale": self._loss_scale(),
        }

    def load(self, stored: StoredState) -> str:
        anew = load_state(self.objective, self.engine.optimizer, stored, self._name, self.world)
        for name, value in stored.about.get("counters", {}).items():
            setattr(self.engine, name, value)
        self.engine.micro_steps = self.engine.global_steps * self.engine.gradient_accumulation_steps()
        self.engine.global_samples = self.engine.global_steps * self.engine.train_batch_size()
        for name in self._loss_scale():
            if name in stored.about.get("loss_scale", {}):
                setattr(self.engine.optimizer.loss_scaler, name, stored.about["loss_scale"][name])
        inner = getattr(self.engine.optimizer, "optimizer", None)
        if hasattr(inner, "ds_opt_adam"):
            _replay_bias_correction(inner)
        return anew

    def _loss_scale(self) -> dict[str, float]:
        """Where the search for fp16's loss scale stands."""
        if not self.engine.fp16_enabled():
            return {}
        return {
            name: value
            for name, value in vars(self.engine.optimizer.loss_scaler).items()
            if type(value) in (int, float)
        }

    def _clip_whole_gradient(self, largest: float) -> float:
        """Clip the gradient that is already summed over the ranks; drop it where it is not finite."""
        groups = self.engine.optimizer.param_groups
        learning = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(learning, largest))
        if not math.isfinite(norm):
            for parameter in learning:
                parameter.grad = None
        return norm


def _weight_of_step(batches: Sequence[Batch], world: World) -> float:
    """What the step's loss is divided by: the weight of all its batches on all ranks. Raises RunError unless above 0. Collective."""
    weight = world.sum([sum(batch.weight for batch in batches)])[0]
    if weight > 0 and math.isfinite(weight):
        return weight
    everyone = world.gather([sample for batch in batches if not batch.filler for sample in batch.samples])
    samples = sorted(sample for of_rank in everyone for sample in of_rank)
    named = ", ".join(map(str, samples[:16])) + (" …" if len(samples) > 16 else "")
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


def _verdict(sums: Sums, batches: Sequence[Batch], applied: bool, world: World) -> dict[str, Any]:
    """Whether the step was taken, and where not, the samples with a loss that is not finite; of the whole step if none.

    Collective where the step was left out, which every rank knows alike.
    """
    if applied:
        return {"applied": True}
    bad = [not math.isfinite(float(loss)) for loss in sums.losses]
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
