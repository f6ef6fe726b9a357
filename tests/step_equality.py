"""Steps with DeepSpeed's own norm, clipping, casts and sums of gradients, to compare with those of dstrain's patches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.common import made_batches, made_engine, made_task

STEPS = 3
CLIP = 0.05
"""Below the norm of each step."""
PATCHES = (
    "use_foreach_norms",
    "find_overflow_by_norm",
    "flatten_gradients_in_fp32",
    "use_foreach_reduction",
    "accumulate_without_casts",
    "use_foreach_step",
)
"""Functions of dstrain.distributed.patches that the engine calls."""


def compare_steps(world: Any, preset: str, precision: str, optimizer: str = "adamw", micro_batches: int = 1) -> float:
    """Return the distance between the master weights of both after some steps, relative to their update. Collective."""
    arguments = (world, preset, precision, optimizer, micro_batches)
    before, patched = _step(*arguments)
    with _deepspeeds_own_step():
        same_before, own = _step(*arguments)
    assert all(torch.equal(before[name], same_before[name]) for name in before)
    update = sum(float((own[name] - before[name]).square().sum()) for name in own)
    difference = sum(float((patched[name] - own[name]).square().sum()) for name in own)
    assert update > 0
    return math.sqrt(difference / update)


def _step(world: Any, preset: str, precision: str, optimizer: str, micro_batches: int) -> tuple[Any, Any]:
    """Return this rank's master weights before and after some steps."""
    rate = 0.1 if optimizer == "sgd" else 1e-3
    # A large eps: the update follows the size of the gradient, and so its norm and clipping.
    optim = {"name": optimizer, "clip": CLIP, "weight_decay": 0.1} | ({"eps": 1e-3} if optimizer == "adamw" else {})
    task = made_task("tiny", 48, 32, {"optim": optim})
    engine = made_engine(task, preset, world, precision=precision, accumulate=micro_batches)
    if precision == "fp16":
        engine.engine.optimizer.loss_scaler.cur_scale = 2.0**10  # gradients of the first scale, 2^16, overflow
    before = _master_weights(engine)
    for batches in made_batches(task, STEPS, 2, micro_batches):
        result = engine.step(batches, rate)
        assert result.applied
        assert result.grad_norm > CLIP
    return before, _master_weights(engine)


def _master_weights(engine: Any) -> dict[str, torch.Tensor]:
    slices = (part for group in engine.state_slices() for part in group)
    return {
        f"{place.name} {place.start}": part.tensor.detach()
        .view(-1)[place.offset : place.offset + place.numel]
        .double()
        .cpu()
        for part in slices
        for place in part.ranges
    }


@contextmanager
def _deepspeeds_own_step() -> Iterator[None]:
    from deepspeed.runtime import bf16_optimizer, utils

    from dstrain.training.engine import deepspeed as engine

    with ExitStack() as stack:
        for name in PATCHES:
            stack.enter_context(mock.patch.object(engine, name))
        for name in ("get_global_norm_of_tensors", "clip_tensors_by_global_norm"):
            stack.enter_context(mock.patch.object(bf16_optimizer, name, getattr(utils, name)))
        yield
