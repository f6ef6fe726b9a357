"""Between a run's parts and a checkpoint: what is written of them, and how it gets back, however the two are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from dstrain.distributed.world import World
from dstrain.errors import CheckpointError
from dstrain.models.zero3 import numel, whole_shape
from dstrain.train.engine.module import Objective
from dstrain.train.state.files import StoredState
from dstrain.train.state.layout import WEIGHT, Part, cut_of

STATE_BYTES = {"adamw": 8, "muon": 4, "lion": 4, "adafactor": 1, "sgd": 0}
"""Bytes that an optimizer keeps for each value that learns, about."""
NAMED = 4
"""Names in a message."""


def stored_shapes(objective: Objective) -> dict[str, list[int]]:
    """Parameter or buffer of the model -> its whole shape, for all that checkpoints hold.

    With adapters, only what is trained; the base and frozen adapters are left out.
    """
    model, trainable = objective.model, objective.trainable
    found = {name: p for name, p in model.named_parameters() if name in trainable or not objective.adapted}
    lasting = model.state_dict(keep_vars=True).keys()
    found |= {name: buffer for name, buffer in model.named_buffers() if name in lasting}
    return {name: list(whole_shape(tensor)) for name, tensor in found.items()}


def checkpoint_bytes(objective: Objective, optimizer: str) -> int:
    """Bytes of a checkpoint, about: fp32 masters and what the optimizer keeps, and frozen weights as they are."""
    names, size = stored_shapes(objective), 0
    for name, parameter in objective.model.named_parameters():
        if name in names:
            trained = name in objective.trainable
            size += numel(parameter) * (4 + STATE_BYTES[optimizer] if trained else parameter.element_size())
    return size


def open_state(checkpoint: Path, world: World) -> StoredState:
    """What a checkpoint holds. Raises CheckpointError on every rank where one cannot read it. Collective."""
    with together(world):
        stored = StoredState(checkpoint)
        stored.about  # noqa: B018  read here, where all ranks hear of a fault
    return stored


def load_state(objective: Objective, optimizer: Any, stored: StoredState, name: str, world: World) -> str:
    """Put a checkpoint into the model and its optimizer, called `name`; another's state begins anew.

    Returns what begins anew, in a sentence; empty where nothing does. Collective.
    """
    shapes = {key: tuple(shape) for key, shape in stored_shapes(objective).items()}
    check_names(shapes, shapes, stored)
    fill_parts(held(objective, optimizer, world.rank, change=True), stored, stored.about["optimizer"] == name, world)
    return _anew(objective, stored, name)


def _anew(objective: Objective, stored: StoredState, name: str) -> str:
    before = stored.about["optimizer"]
    if before != name:
        return f"the optimizer was {before} and is {name} from here on: the weights go on, what it keeps begins anew"
    learning = sorted(objective.trainable)
    new = [key for key in learning if not stored.numbers(key) and stored.keys(key) <= {WEIGHT}]
    if not new or len(new) == len(learning):  # plain SGD keeps nothing
        return ""
    return f"{some(new)} did not learn before: the weights go on, what {name} keeps for them begins anew"


def held(objective: Objective, optimizer: Any, rank: int, change: bool = False) -> Iterator[list[Part]]:
    """The parts of this process that checkpoints hold; with `change` their values go where the model sees them.

    Collective with `change`.
    """
    names = stored_shapes(objective).keys()
    for parts in cut_of(objective.model, optimizer, rank).live(change):
        yield [part for part in parts if not part.places or any(place.name in names for place in part.places)]


def check_names(shapes: Mapping[str, tuple[int, ...]], needed: Iterable[str], stored: StoredState) -> None:
    """Raise CheckpointError where the checkpoint is another model's.

    `shapes`: parameter or buffer of the model -> its whole shape; `needed`: those that the checkpoint must hold.
    """
    missing = [name for name in needed if name not in stored.shapes]
    unexpected = [name for name in stored.shapes if name not in shapes]
    if missing or unexpected:
        raise CheckpointError(
            f"{stored.checkpoint}: lacks {some(missing)} and has {some(unexpected)} too much; "
            "the recipe's model is not the one that was trained"
        )
    wrong = [name for name, shape in stored.shapes.items() if shape != shapes[name]]
    if wrong:
        raise CheckpointError(
            f"{stored.checkpoint}: {some(wrong)} has another shape in the recipe's model, "
            "which is not the one that was trained"
        )


def some(names: Sequence[str]) -> str:
    """A few of the names, for a message."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "") or "nothing"


def fill_parts(live: Iterable[Sequence[Part]], stored: StoredState, optimizer: bool, world: World) -> None:
    """Read every value that this process holds; `optimizer`: what it keeps too, else that begins anew.

    One stretch is in memory at a time. Raises CheckpointError on every rank where one cannot be read. Collective.
    """
    for parts in live:
        with together(world):
            for part in parts:
                if optimizer and part.optimizer is not None:
                    _fill_optimizer(part, stored)
                _fill(part, WEIGHT, part.tensor, stored)


@contextmanager
def together(world: World) -> Iterator[None]:
    """What fails inside on one rank raises CheckpointError on all, which would wait for it otherwise. Collective."""
    cause, fault = None, None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks must hear of it
        cause, fault = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    faults = [f"rank {rank}: {told}" for rank, told in enumerate(world.gather(fault)) if told]
    if faults:
        raise CheckpointError(faults[0]) from cause


def _fill_optimizer(part: Part, stored: StoredState) -> None:
    """A parameter that was frozen so far has none of it: its own begins anew. Of several counts a part has the highest."""
    names = sorted({place.name for place in (*part.places, *chain.from_iterable(part.own_places.values()))})
    kept = {key for name in names for key in stored.keys(name)} - {WEIGHT}
    numbers = dict(sorted(pair for name in names for pair in stored.numbers(name).items()))
    if not kept and not numbers:
        return
    if not part.state:
        part.wake()
    # DeepSpeed makes Muon's at its first step, in the gradient's precision.
    for key in sorted(kept - part.state.keys()):
        dtype = next(stored.dtype(name, key) for name in names if key in stored.keys(name))
        part.make(key, dtype)
    for key, tensor in part.along().items():
        if key != WEIGHT:
            tensor.zero_()
            _fill(part, key, tensor, stored, only={name for name in names if key in stored.keys(name)})
    for key, tensor in part.beside().items():
        (place,) = part.places
        if stored.shape_of(place.name, key) != tuple(tensor.shape):
            raise CheckpointError(f"{stored.checkpoint}: {key} of {place.name} has another shape than it has now")
        values = torch.empty(tensor.numel(), dtype=stored.dtype(place.name, key))
        stored.read(place.name, key, values)
        tensor.copy_(values.view(tensor.shape))
    for key in part.numbers():
        if key not in numbers:
            raise CheckpointError(f"{stored.checkpoint}: holds no {key} of {some(names)}; choose another checkpoint")
        part.set_number(key, numbers[key])


def _fill(part: Part, key: str, tensor: torch.Tensor, stored: StoredState, only: set[str] | None = None) -> None:
    flat = tensor.detach().view(-1)
    for place in part.places_of(key):
        if place.name in stored.shapes and (only is None or place.name in only):
            stored.read(place.name, key, flat.narrow(0, place.offset, place.numel), place.start)
