"""A checkpoint's weights, put into a model that does not learn: whole on every process, or into ZeRO-3's shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from dstrain.distributed.world import SoloWorld, World
from dstrain.errors import CheckpointError
from dstrain.models.zero3 import fill, whole_shape
from dstrain.train.state.files import StoredState
from dstrain.train.state.layout import WEIGHT
from dstrain.train.state.load import check_names, together


def restore(model: torch.nn.Module, checkpoint: Path, world: World, adapted: bool = False) -> None:
    """Put the weights of a checkpoint into the model; `adapted`: it holds those that learn, and the others stay.

    One parameter is read at a time, in pieces where it is whole; where the model is in shards, by rank 0 alone, and
    CheckpointError is raised on every rank where they do not fit or cannot be read. Collective under ZeRO-3.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    in_shards = any(hasattr(tensor, "ds_id") for tensor in tensors.values())
    ranks: World = world if in_shards else SoloWorld(world.device)
    with together(ranks):
        stored = _open(tensors, checkpoint, adapted) if ranks.rank == 0 else None
    if in_shards:
        _fill_shards(tensors, stored, world)
        return
    assert stored is not None
    _fill_whole(tensors, stored)


def _fill_shards(tensors: Mapping[str, torch.Tensor], stored: StoredState | None, world: World) -> None:
    """Rank 0 reads. After the first that it cannot read it goes on without, so that nobody waits for it."""
    faults: list[str] = []

    def read(name: str) -> torch.Tensor | None:
        if stored is None or faults:
            return None
        try:
            return stored.whole(name)
        except CheckpointError as error:
            faults.append(str(error))
            return None

    for name in world.broadcast([*stored.shapes] if stored else None):
        values, tensor = read(name), tensors[name]
        if not hasattr(tensor, "ds_id"):  # a buffer, or an adapter: whole on every rank, and small
            values = world.broadcast(values)
        fill(tensor, None if values is None else partial(_same, values))
    with together(world):
        if faults:
            raise CheckpointError(faults[0])


def _fill_whole(tensors: Mapping[str, torch.Tensor], stored: StoredState) -> None:
    """Values are cast piece by piece, so that no second copy of a large parameter is ever there."""
    for name in stored.shapes:
        target = tensors[name].detach()
        if target.is_contiguous():
            stored.read(name, WEIGHT, target.view(-1))
        else:
            target.copy_(stored.whole(name))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _open(tensors: Mapping[str, torch.Tensor], checkpoint: Path, adapted: bool) -> StoredState:
    """The stored weights. Raises CheckpointError where they are not the model's."""
    stored = StoredState(checkpoint)
    # By tensor: a tied one is stored under one of its names.
    there = {id(tensors[name]) for name in stored.shapes if name in tensors}
    shapes = {name: whole_shape(tensor) for name, tensor in tensors.items()}
    needed = [name for name, tensor in tensors.items() if tensor.requires_grad or not adapted]
    check_names(shapes, [name for name in needed if id(tensors[name]) not in there], stored)
    return stored
