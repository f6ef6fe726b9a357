"""A checkpoint's weights, put into a model that does not learn: whole on every process, or into ZeRO-3's shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from dstrain.distributed.world import SingleProcessWorld, World
from dstrain.errors import CheckpointError
from dstrain.models.params.zero3 import assign, full_shape
from dstrain.train.state.files import CheckpointReader
from dstrain.train.state.load import check_state_names, raise_on_all_ranks
from dstrain.train.state.slices import WEIGHT_KEY


def load_weights(model: torch.nn.Module, checkpoint: Path, world: World, adapters_only: bool = False) -> None:
    """Put the weights of a checkpoint into the model; `adapted`: it holds those that learn, and the others stay.

    One parameter is read at a time, in pieces where it is whole; where the model is in shards, by rank 0 alone, and
    CheckpointError is raised on every rank where they do not fit or cannot be read. Collective under ZeRO-3.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    in_shards = any(hasattr(tensor, "ds_id") for tensor in tensors.values())
    ranks: World = world if in_shards else SingleProcessWorld(world.device)
    with raise_on_all_ranks(ranks):
        stored = _open_checked(tensors, checkpoint, adapters_only) if ranks.rank == 0 else None
    if in_shards:
        _load_sharded(tensors, stored, world)
        return
    assert stored is not None
    _load_unsharded(tensors, stored)


def _load_sharded(tensors: Mapping[str, torch.Tensor], reader: CheckpointReader | None, world: World) -> None:
    """Rank 0 reads. After the first that it cannot read it goes on without, so that nobody waits for it."""
    faults: list[str] = []

    def read_tensor(name: str) -> torch.Tensor | None:
        if reader is None or faults:
            return None
        try:
            return reader.read_tensor(name)
        except CheckpointError as error:
            faults.append(str(error))
            return None

    for name in world.broadcast([*reader.shapes] if reader else None):
        values, tensor = read_tensor(name), tensors[name]
        if not hasattr(tensor, "ds_id"):  # a buffer, or an adapter: whole on every rank, and small
            values = world.broadcast(values)
        assign(tensor, None if values is None else partial(_identity, values))
    with raise_on_all_ranks(world):
        if faults:
            raise CheckpointError(faults[0])


def _load_unsharded(tensors: Mapping[str, torch.Tensor], reader: CheckpointReader) -> None:
    """Values are cast piece by piece, so that no second copy of a large parameter is ever there."""
    for name in reader.shapes:
        target = tensors[name].detach()
        if target.is_contiguous():
            reader.read_into(name, WEIGHT_KEY, target.view(-1))
        else:
            target.copy_(reader.read_tensor(name))


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _open_checked(tensors: Mapping[str, torch.Tensor], checkpoint: Path, adapters_only: bool) -> CheckpointReader:
    """The stored weights. Raises CheckpointError where they are not the model's."""
    stored = CheckpointReader(checkpoint)
    # By tensor: a tied one is stored under one of its names.
    there = {id(tensors[name]) for name in stored.shapes if name in tensors}
    shapes = {name: full_shape(tensor) for name, tensor in tensors.items()}
    needed = [name for name, tensor in tensors.items() if tensor.requires_grad or not adapters_only]
    check_state_names(shapes, [name for name in needed if id(tensors[name]) not in there], stored)
    return stored
