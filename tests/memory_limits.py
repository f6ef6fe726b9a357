"""Passes that run out of memory: a real failed allocation in the forward or backward pass of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.batch import Batch

TOO_LARGE = 2**50
"""Bytes that no machine allocates."""


def limit_micro_batch(engine: Any, samples: int, where: str = "forward", rank: int = 1, from_step: int = 1) -> None:
    """Let passes of more than `samples` samples run out of memory on one rank of an engine, from a step on.

    `from_step`: 0 for the passes that are tried before the first step too.
    `where`: at the end of the forward pass, in the middle of the backward pass, or in the update.
    """
    module, world = engine.train_module, engine.world
    if world.rank != rank:
        return
    forward = module.forward

    def limited(batch: Batch, *args: Any, **options: Any) -> Any:
        total, metrics = forward(batch, *args, **options)
        is_trial = world.log.phase.startswith("the longest batch") and from_step == 0
        is_step = is_trial or (world.log.phase.startswith("step") and (world.log.step or 0) >= from_step)
        if where == "evaluation":
            is_step = world.log.phase.startswith("evaluation")
        if is_step and len(batch.samples) > samples:
            if where in ("forward", "evaluation"):
                torch.empty(TOO_LARGE, dtype=torch.uint8)
            elif where == "backward":
                in_the_middle.append(True)
        return total, metrics

    in_the_middle: list[bool] = []
    parameters = [parameter for parameter in module.model.parameters() if parameter.requires_grad]

    def fail(gradient: torch.Tensor) -> None:
        if in_the_middle:
            torch.empty(TOO_LARGE, dtype=torch.uint8)

    parameters[len(parameters) // 2].register_hook(fail)
    module.forward = limited
