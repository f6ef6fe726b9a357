"""A checkpoint's weights, put into a model that does not learn: whole on every process, or into ZeRO-3's shards."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dstrain.errors import CheckpointError
from dstrain.models.sharded import fill, whole_shape
from dstrain.train.reshape import whole_weights
from dstrain.world import World

NAMES = 4


def restore(model: torch.nn.Module, checkpoint: Path, world: World, adapted: bool = False) -> None:
    """Put the weights of a checkpoint into the model; `adapted`: it holds those that learn, and the others stay.

    Where the model is in shards rank 0 alone reads them, into the memory of its host. Raises CheckpointError on every
    rank where they do not fit. Collective under ZeRO-3.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    in_shards = any(hasattr(tensor, "ds_id") for tensor in tensors.values())
    found, fault = _read(tensors, checkpoint, adapted) if world.rank == 0 or not in_shards else ({}, None)
    fault = world.gather(fault)[0] if in_shards else fault
    if fault is not None:
        raise CheckpointError(f"{checkpoint}: {fault}")
    for name, tensor in tensors.items():
        stored = found.get(name)
        if in_shards and not hasattr(tensor, "ds_id"):  # a buffer, or an adapter: whole on every rank, and small
            stored = world.gather(stored)[0]
        fill(tensor, None if stored is None else partial(_same, stored))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _read(
    tensors: Mapping[str, torch.Tensor], checkpoint: Path, adapted: bool
) -> tuple[dict[str, torch.Tensor], str | None]:
    """The stored weights, and why they are not the model's."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # DeepSpeed tells there what it does, with bars
            found = whole_weights(checkpoint)
    except Exception as error:  # whatever it is, the other ranks must hear of it, not wait
        return {}, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    # By tensor: a tied one may be stored under one of its names.
    there = {id(tensors[name]) for name in found if name in tensors}
    missing = [
        name for name, tensor in tensors.items() if id(tensor) not in there and (tensor.requires_grad or not adapted)
    ]
    unexpected = [name for name in found if name not in tensors]
    if missing or unexpected:
        return found, (
            f"lacks {_some(missing)} and has {_some(unexpected)} too much; "
            "the recipe's model is not the one that was trained"
        )
    wrong = [name for name, value in found.items() if tuple(value.shape) != whole_shape(tensors[name])]
    if wrong:
        return found, f"{_some(wrong)} has another shape in the recipe's model, which is not the one that was trained"
    return found, None


def _some(names: list[Any]) -> str:
    return ", ".join(names[:NAMES]) or "nothing"
