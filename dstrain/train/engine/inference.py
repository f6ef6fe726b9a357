"""Forward passes alone: what evaluation, generation and a reference need of a model that does not learn."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.distributed.world import World
from dstrain.models.params.zero3 import init_deepspeed
from dstrain.train.engine.module import compute_step_stats, evaluate_batch


class ForwardEngine:
    """A module that is whole on every process, or in ZeRO-3's shards where the JSON says stage 3.

    At stage 3 the module must have been built inside `sharded_construction`, and every rank must make the same passes.
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
        zero = {key: value for key, value in ds_config["zero_optimization"].items() if key != "offload_optimizer"}
        self.module, *_ = deepspeed.initialize(model=module, config={**ds_config, "zero_optimization": zero})
        self.module.eval()

    @property
    def unwrapped(self) -> Any:
        """The module itself; inside its submodules' passes their weights are whole."""
        return self.module.module if self.is_sharded else self.module

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Any:
        """What the module returns for a batch. Collective at stage 3."""
        return self.module(batch.to(self.world.device))

    def evaluate(self, batch: Batch) -> StepResult:
        """Sums over one batch; the module must be an Objective. Collective at stage 3."""
        return evaluate_batch(self.module, batch, self.world)

    def compute_step_stats(self, batches: Iterable[Batch]) -> list[Mapping[str, torch.Tensor]]:
        """What `evaluate` needs beside each batch, where the task surveys. Collective."""
        return compute_step_stats(self.module, batches, self.world)


def with_private_nvme_path(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same JSON; weights kept on a disk go into a folder of this process's own below the one it names.

    DeepSpeed empties the folder it is given: that of a run may be in use by its training.
    """
    own = copy.deepcopy(dict(ds_config))
    block = own.get("zero_optimization", {}).get("offload_param", {})
    if block.get("device") == "nvme":
        block["nvme_path"] = str(Path(block["nvme_path"]) / f"forward-{os.getpid()}")
    return own


def remove_private_nvme_path(ds_config: Mapping[str, Any]) -> None:
    """Remove the folder that `apart` named."""
    path = ds_config.get("zero_optimization", {}).get("offload_param", {}).get("nvme_path")
    if path is not None and Path(path).name == f"forward-{os.getpid()}":
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # in use by others, or never made
            Path(path).parent.rmdir()
