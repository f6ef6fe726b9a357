"""Protocols of an engine, which takes one training step, and the seed of a step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from dstrain.batch import Batch, StepResult
from dstrain.distributed.world import World
from dstrain.train.engine.module import TrainModule
from dstrain.train.engine.recovery import MakeFiller
from dstrain.train.state.files import CheckpointReader, StateFile
from dstrain.train.state.slices import StateSlice


class EvalEngine(Protocol):
    """Engine without an optimizer: all that an evaluation needs."""

    world: World

    @property
    def unwrapped(self) -> Any:
        """The TrainModule without DeepSpeed's engine; its submodules' weights are gathered in their forward passes."""

    @property
    def is_sharded(self) -> bool:
        """True where each rank holds a part of the weights: every rank must make the same forward passes."""

    def evaluate(self, batch: Batch) -> StepResult:
        """Return the sums over one batch without changing the weights. Collective at stage 3."""

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        """Return the extra columns of each batch for a task with step statistics. Collective."""


class Engine(EvalEngine, Protocol):
    """Engine with an optimizer: all that the training loop needs."""

    train_module: TrainModule

    def step(self, batches: Sequence[Batch], lr: float, make_filler: MakeFiller | None = None) -> StepResult:
        """Take one optimizer step over these micro-batches of this rank. Collective.

        With `make_filler`, a forward pass that runs out of memory where the step can still be dropped on all ranks
        raises nothing: see `StepResult.out_of_memory`.
        """

    def state_slices(self) -> Iterator[list[StateSlice]]:
        """Yield this rank's part of weights and optimizer state; a group is valid until the next is requested."""

    def state_files(self) -> Iterator[StateFile]:
        """Yield this rank's part of the state as the files of a checkpoint."""

    def state_metadata(self) -> dict[str, Any]:
        """Return names, full shapes and counters, as rank 0 writes them once per checkpoint."""

    def load(self, checkpoint: CheckpointReader) -> str:
        """Load a checkpoint of any engine on any number of ranks. Collective.

        Returns a sentence on the optimizer state that starts from zero; empty if all of it was loaded.
        """


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for one step. Dropout depends on seed, step and rank alone, so no random state needs saving."""
    # crc32, since `hash()` of a text differs between processes.
    torch.manual_seed(zlib.crc32(f"{seed}/{step}/{rank}".encode()))
