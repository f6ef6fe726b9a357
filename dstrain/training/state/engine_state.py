"""State of an engine: what a save writes, and what is read from a checkpoint of any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dstrain.distributed.world import SingleProcessWorld, World
from dstrain.errors import CheckpointError, describe_key_diff, first_names
from dstrain.models.params import assign, full_numel, full_shape
from dstrain.training.state.blockwise import is_blockwise, load_blockwise_state
from dstrain.training.state.files import CheckpointReader
from dstrain.training.state.layout import WEIGHT_KEY, StateSlice, detect_layout
from dstrain.training.state.manifest import raise_on_all_ranks

STATE_BYTES_PER_PARAM = {
    "adamw": 8,
    "muon": 4,
    "lion": 4,
    "adafactor": 1,
    "sgd": 0,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
}
"""Approximate bytes of optimizer state per trained value."""
MAX_NAMES = 4
"""Names that a message lists."""


@dataclass(frozen=True)
class StoredModel:
    """A model, with which of its parameters a checkpoint holds."""

    model: torch.nn.Module
    trainable_names: Collection[str]
    """Names of the trained parameters."""
    adapters_only: bool
    """True if frozen parameters, such as the base of LoRA adapters, are left out."""

    def shapes(self) -> dict[str, list[int]]:
        """Return name -> full shape of every stored parameter and persistent buffer, also where ZeRO-3 shards it."""
        model = self.model
        parameters = (
            pair for pair in model.named_parameters() if not self.adapters_only or pair[0] in self.trainable_names
        )
        # `named_buffers` also has those that are never saved, such as rotary frequencies.
        persistent = model.state_dict(keep_vars=True).keys()
        buffers = (pair for pair in model.named_buffers() if pair[0] in persistent)
        return {name: list(full_shape(tensor)) for name, tensor in (*parameters, *buffers)}

    def estimate_checkpoint_bytes(self, optimizer_name: str) -> int:
        """Return the approximate size of a checkpoint: fp32 masters and optimizer state, and frozen weights as is."""
        names, size = self.shapes(), 0
        for name, parameter in self.model.named_parameters():
            if name in names:
                # 4: the fp32 master weight.
                trained = 4 + STATE_BYTES_PER_PARAM[optimizer_name]
                size += full_numel(parameter) * (trained if name in self.trainable_names else parameter.element_size())
        return size


def open_checkpoint(checkpoint: Path, world: World) -> CheckpointReader:
    """Open a checkpoint's state. Raises CheckpointError on every rank if one cannot read it. Collective."""
    with raise_on_all_ranks(world):
        stored = CheckpointReader(checkpoint)
        stored.metadata  # noqa: B018  read now, where an error reaches all ranks
    return stored


def load_state(model: StoredModel, optimizer: Any, reader: CheckpointReader, optimizer_name: str, world: World) -> str:
    """Load a checkpoint into the model and its optimizer; the state of another optimizer is left out. Collective.

    Returns a sentence on the optimizer state that starts from zero; empty if all of it was loaded. Raises
    CheckpointError on every rank if the checkpoint does not fit the model or cannot be read.
    """
    shapes = {key: tuple(shape) for key, shape in model.shapes().items()}
    # Before any value is read, so that a refused checkpoint leaves the model as it is.
    check_state_names(shapes, shapes, reader)
    load_slices(
        iter_state(model, optimizer, world.rank, write_back=True),
        reader,
        reader.metadata["optimizer"] == optimizer_name,
        world,
    )
    return _describe_reset_state(model, reader, optimizer_name)


def _describe_reset_state(model: StoredModel, reader: CheckpointReader, optimizer_name: str) -> str:
    before = reader.metadata["optimizer"]
    if before != optimizer_name:
        return (
            f"the optimizer was {before} and is {optimizer_name} from now on: weights were loaded, "
            "its state starts from zero"
        )
    trained = sorted(model.trainable_names)
    new = [key for key in trained if not reader.scalars(key) and reader.state_keys(key) <= {WEIGHT_KEY}]
    if not new or len(new) == len(trained):  # plain SGD has no state
        return ""
    return (
        f"{first_names(new, MAX_NAMES)} were frozen before: their weights were loaded, their {optimizer_name} state "
        "starts from zero"
    )


def iter_state(model: StoredModel, optimizer: Any, rank: int, write_back: bool = False) -> Iterator[list[StateSlice]]:
    """Yield the slices of this rank that checkpoints hold, in groups that are in memory together.

    With `write_back`, the slices' values are copied into the model's weights afterwards: Collective.
    """
    names = model.shapes().keys()
    for slices in detect_layout(model.model, optimizer, rank).iter_slice_groups(write_back):
        yield [part for part in slices if not part.ranges or any(place.name in names for place in part.ranges)]


def check_state_names(shapes: Mapping[str, tuple[int, ...]], required: Iterable[str], reader: CheckpointReader) -> None:
    """Raise CheckpointError if the checkpoint is of another model.

    `shapes` are the full shapes of the model's parameters and buffers; `required` are those that it must have.
    """
    missing = [name for name in required if name not in reader.shapes]
    unexpected = [name for name in reader.shapes if name not in shapes]
    if missing or unexpected:
        raise CheckpointError(
            f"{reader.checkpoint}: {describe_key_diff(missing, unexpected)}; "
            "the recipe's model is not the one that was trained"
        )
    wrong = [name for name, shape in reader.shapes.items() if shape != shapes[name]]
    if wrong:
        raise CheckpointError(
            f"{reader.checkpoint}: {first_names(wrong, MAX_NAMES)} has another shape in the recipe's model, "
            "which is not the one that was trained"
        )


def load_slices(
    slice_groups: Iterable[Sequence[StateSlice]], reader: CheckpointReader, load_optimizer: bool, world: World
) -> None:
    """Read all values of these slices; with `load_optimizer` the optimizer's state too. Collective.

    One stored block is in memory at a time. Raises CheckpointError on every rank if a value cannot be read.
    """
    for parts in slice_groups:
        with raise_on_all_ranks(world):
            for part in parts:
                # The optimizer first: it may have to take a step to allocate its state, and the weights are set
                # after that.
                if load_optimizer and part.optimizer is not None:
                    load = load_blockwise_state if is_blockwise(part.optimizer) else _load_optimizer_state
                    load(part, reader)
                _load_tensor(part, WEIGHT_KEY, part.tensor, reader)


def _load_optimizer_state(state_slice: StateSlice, reader: CheckpointReader) -> None:
    """Load the optimizer state of a slice; parameters that were frozen before start from zero.

    A slice of several parameters has one step number: the highest of theirs.
    """
    names = sorted(
        {place.name for place in (*state_slice.ranges, *chain.from_iterable(state_slice.key_ranges.values()))}
    )
    kept = {key for name in names for key in reader.state_keys(name)} - {WEIGHT_KEY}
    # Sorted, so that the highest number of each key remains.
    numbers = dict(sorted(pair for name in names for pair in reader.scalars(name).items()))
    if not kept and not numbers:
        return
    if not state_slice.optimizer_state:
        state_slice.init_optimizer_state()
    # DeepSpeed allocates Muon's momentum at the first step, in the gradient's precision.
    for key in sorted(kept - state_slice.optimizer_state.keys()):
        dtype = next(reader.get_dtype(name, key) for name in names if key in reader.state_keys(name))
        state_slice.allocate_state(key, dtype)
    for key, tensor in state_slice.elementwise_state().items():
        if key != WEIGHT_KEY:
            # Parameters that were frozen when it was saved have no state to read.
            tensor.zero_()
            _load_tensor(
                state_slice, key, tensor, reader, only_names={name for name in names if key in reader.state_keys(name)}
            )
    for key, tensor in state_slice.other_tensors().items():
        # Only slices of one parameter have such state: Adafactor is refused at stages that partition.
        (place,) = state_slice.ranges
        if reader.get_shape(place.name, key) != tuple(tensor.shape):
            raise CheckpointError(f"{reader.checkpoint}: {key} of {place.name} has another shape in this run")
        values = torch.empty(tensor.numel(), dtype=reader.get_dtype(place.name, key))
        reader.read_into(place.name, key, values)
        tensor.copy_(values.view(tensor.shape))
    for key in state_slice.scalars():
        if key not in numbers:
            raise CheckpointError(
                f"{reader.checkpoint}: has no {key} of {first_names(names, MAX_NAMES)}; choose another checkpoint"
            )
        state_slice.set_scalar(key, numbers[key])


def _load_tensor(
    state_slice: StateSlice,
    key: str,
    tensor: torch.Tensor,
    reader: CheckpointReader,
    only_names: set[str] | None = None,
) -> None:
    flat = tensor.detach().view(-1)
    for place in state_slice.key_ranges.get(key, state_slice.ranges):
        if place.name in reader.shapes and (only_names is None or place.name in only_names):
            reader.read_into(place.name, key, flat.narrow(0, place.offset, place.numel), place.start)


def load_weights(model: torch.nn.Module, checkpoint: Path, world: World, adapters_only: bool = False) -> None:
    """Load the weights of a checkpoint into the model; with `adapters_only`, frozen weights may be missing in it.

    One parameter is read at a time; for a sharded model, by rank 0 alone. Collective under ZeRO-3, where
    CheckpointError is raised on every rank if the weights do not fit or cannot be read.
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
    """Load with rank 0 as the reader. After a fault it continues without values, since the other ranks wait for it."""
    faults: list[str] = []

    def read_tensor(name: str) -> torch.Tensor | None:
        if reader is None or faults:
            return None
        try:
            return reader.read_tensor(name)
        except CheckpointError as error:
            faults.append(str(error))
            return None

    # Rank 0's list, as `assign` is collective and needs one order on all ranks; only rank 0 has a reader.
    for name in world.broadcast([*reader.shapes] if reader else None):
        values, tensor = read_tensor(name), tensors[name]
        if not hasattr(tensor, "ds_id"):  # a buffer, or an adapter: replicated, and small
            values = world.broadcast(values)
        assign(tensor, None if values is None else values.detach)
    with raise_on_all_ranks(world):
        if faults:
            raise CheckpointError(faults[0])


def _load_unsharded(tensors: Mapping[str, torch.Tensor], reader: CheckpointReader) -> None:
    """Load piece by piece, so that there is no second copy of a large parameter."""
    for name in reader.shapes:
        target = tensors[name].detach()
        if target.is_contiguous():
            reader.read_into(name, WEIGHT_KEY, target.view(-1))
        else:
            target.copy_(reader.read_tensor(name))


def _open_checked(tensors: Mapping[str, torch.Tensor], checkpoint: Path, adapters_only: bool) -> CheckpointReader:
    """Open the stored weights. Raises CheckpointError if they are of another model."""
    stored = CheckpointReader(checkpoint)
    # By id: a tied tensor is stored under one of its names.
    there = {id(tensors[name]) for name in stored.shapes if name in tensors}
    shapes = {name: full_shape(tensor) for name, tensor in tensors.items()}
    needed = [name for name, tensor in tensors.items() if tensor.requires_grad or not adapters_only]
    check_state_names(shapes, [name for name in needed if id(tensors[name]) not in there], stored)
    return stored
