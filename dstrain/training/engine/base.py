"""What all engines share, and an engine for inference."""

from __future__ import annotations

import copy
import os
import secrets
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import OptimConfig
from dstrain.distributed.world import World
from dstrain.models.params import ParamGroup, init_deepspeed
from dstrain.models.tiles import use_leaf_modules
from dstrain.training.engine.module import (
    StepAccumulator,
    TrainModule,
    compute_step_stats,
    total_step_weight,
    with_scores,
    with_step_stats,
)
from dstrain.training.state.engine_state import iter_state, load_state
from dstrain.training.state.files import CheckpointReader, StateFile, iter_state_files
from dstrain.training.state.layout import StateSlice


class EvalEngine(ABC):
    """Forward passes without gradients, of a module that every rank holds or shares: all that an evaluation needs."""

    world: World
    is_sharded: bool
    """True where each rank holds a part of the weights: every rank must make the same forward passes."""
    module: Any
    """The module, or DeepSpeed's engine around it."""

    @property
    @abstractmethod
    def unwrapped(self) -> Any:
        """The module without DeepSpeed's engine; its submodules' weights are gathered in their forward passes."""

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> StepResult:
        """Return the sums over one batch without changing the weights; the module must be a TrainModule.

        Collective at stage 3.
        """
        self.module.eval()
        (batch,) = with_scores(self.module, [batch], self.world)
        sums = StepAccumulator()
        sums.add(*self.module(batch.to(self.world.device)))
        return sums.result([batch])

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        """Return the extra columns of each batch for a task with step statistics. Collective."""
        self.module.eval()
        return compute_step_stats(self.module, batches, self.world)


class Engine(EvalEngine):
    """A module with an optimizer: a step, and what a checkpoint holds."""

    needs_all_gradients = False
    """True where a step is wrong unless every micro-batch gives the same weights a gradient."""

    def __init__(self, train_module: TrainModule, param_groups: Sequence[ParamGroup], optim: OptimConfig) -> None:
        self.train_module = train_module
        self._lr_scales = [group.lr_scale for group in param_groups]
        self._optimizer_name = optim.name

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """The optimizer whose state a checkpoint holds."""

    @abstractmethod
    def step(self, batches: Sequence[Batch], lr: float, weight: float | None = None) -> StepResult:
        """Take one optimizer step over these micro-batches of this rank. Collective.

        `weight`: that of the batches of all ranks, where it is known.
        """

    @property
    def unwrapped(self) -> TrainModule:
        return self.train_module

    def _prepare_step(self, batches: Sequence[Batch], weight: float | None) -> tuple[Sequence[Batch], float]:
        """Return the batches of a step with the columns that its losses read, and the weight of the whole step."""
        self.module.train()
        batches, inputs = with_scores(self.module, batches, self.world), self.train_module.loss_inputs
        # Before the losses: a task such as KTO compares with a mean over the whole step, which no micro-batch knows.
        batches = with_step_stats(self.module, inputs, batches, self.world)
        # Weights may follow from scores, which are known only now.
        known = None if len(self.train_module.reward_models) else weight
        return batches, total_step_weight(batches, self.world, inputs, known)

    def state_slices(self) -> Iterator[list[StateSlice]]:
        """Yield this rank's part of weights and optimizer state; a group is valid until the next is requested."""
        return iter_state(self.train_module.stored_model, self.optimizer, self.world.rank)

    def state_files(self) -> Iterator[StateFile]:
        """Yield this rank's part of the state as the files of a checkpoint."""
        return iter_state_files(self.state_slices(), self.world.rank, self.world.size)

    def state_metadata(self) -> dict[str, Any]:
        """Return names, full shapes and counters, as rank 0 writes them once per checkpoint."""
        return {"shapes": self.train_module.stored_model.shapes(), "optimizer": self._optimizer_name}

    def load(self, checkpoint: CheckpointReader) -> str:
        """Load a checkpoint of any engine on any number of ranks. Collective.

        Returns a sentence on the optimizer state that starts from zero; empty if all of it was loaded.
        """
        model = self.train_module.stored_model
        return load_state(model, self.optimizer, checkpoint, self._optimizer_name, self.world)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for one step. Dropout depends on seed, step and rank alone, so no random state needs saving."""
    # crc32, since `hash()` of a text differs between processes.
    torch.manual_seed(zlib.crc32(f"{seed}/{step}/{rank}".encode()))


class ForwardEngine(EvalEngine):
    """Module that is replicated on every rank, or in ZeRO-3 shards if the DeepSpeed config says stage 3.

    At stage 3 the module must have been built inside `zero3_init`, and every rank must make the same forward passes.
    """

    def __init__(self, module: torch.nn.Module, ds_config: Mapping[str, Any], world: World) -> None:
        self.world = world
        self.is_sharded = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
        self.module: Any = module.requires_grad_(False).eval()
        if not self.is_sharded:
            self.module.to(world.device)
            return
        import deepspeed

        init_deepspeed()
        use_leaf_modules(module)
        zero = {key: value for key, value in ds_config["zero_optimization"].items() if key != "offload_optimizer"}
        self.module, *_ = deepspeed.initialize(model=module, config={**ds_config, "zero_optimization": zero})
        # DeepSpeed's engine is a new module around this one, and new modules are in training mode.
        self.module.eval()

    @property
    def unwrapped(self) -> Any:
        return self.module.module if self.is_sharded else self.module

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Any:
        """Return the module's result for a batch. Collective at stage 3."""
        return self.module(batch.to(self.world.device))


def with_private_nvme_path(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a folder of this process for weights on NVMe, below the configured one.

    DeepSpeed empties the folder that it gets, and a run's folder may be in use by its training.
    """
    own = copy.deepcopy(dict(ds_config))
    block = own.get("zero_optimization", {}).get("offload_param", {})
    if block.get("device") == "nvme":
        # Not the process id alone: another host may use the same one, on a shared disk.
        path = Path(block["nvme_path"]) / f"forward-{os.getpid()}-{secrets.token_hex(4)}"
        _private_nvme_paths.add(str(path))
        block["nvme_path"] = str(path)
    return own


_private_nvme_paths: set[str] = set()
"""Folders that this process has named."""


def remove_private_nvme_path(ds_config: Mapping[str, Any]) -> None:
    """Remove the folder of `with_private_nvme_path`; the folder of the preset stays."""
    path = ds_config.get("zero_optimization", {}).get("offload_param", {}).get("nvme_path")
    if path in _private_nvme_paths:
        shutil.rmtree(path, ignore_errors=True)
