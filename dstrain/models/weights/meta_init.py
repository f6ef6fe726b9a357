"""Models without values in their parameters, for weights that come from elsewhere: nothing is drawn, nothing is held twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from dstrain.models.patches import parameters_on_meta

_META_INIT = ContextVar("_EMPTY", default=False)
_RANDOM_INIT_FOLDERS: ContextVar[list[str] | None] = ContextVar("_FOLLOW", default=None)


def is_meta_init() -> bool:
    """Whether `no_values` is around this call."""
    return _META_INIT.get()


def allow_random_init(folder: str) -> bool:
    """Whether `all_values_follow` is around this call; notes that the weights of this folder are drawn."""
    drawn = _RANDOM_INIT_FOLDERS.get()
    if drawn is not None:
        drawn.append(folder)
    return drawn is not None


@contextmanager
def weights_loaded_later() -> Iterator[list[str]]:
    """Inside, `load_model` may draw the weights of a folder that has a config and no weights: all of them are about to be
    replaced by a checkpoint's. Yields the folders of which it did so.
    """
    drawn: list[str] = []
    token = _RANDOM_INIT_FOLDERS.set(drawn)
    try:
        yield drawn
    finally:
        _RANDOM_INIT_FOLDERS.reset(token)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, modules get parameters on the meta device, which take no memory; buffers are what they are.

    `load_model` then reads no weights of a folder, but its config.

    For one thread. Parameters that two modules share stay one, where the second gets what the first has; accelerate's
    `init_empty_weights` (1.15) makes a new one for each module and so takes ties apart.
    """
    token = _META_INIT.set(True)
    try:
        with parameters_on_meta():
            yield
    finally:
        _META_INIT.reset(token)


def materialize(model: torch.nn.Module) -> None:
    """Give every parameter that is on the meta device memory on the host, with whatever lies there."""
    made: dict[int, torch.nn.Parameter] = {}  # what is shared stays shared
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.device.type == "meta":
                if id(old) not in made:
                    room = torch.empty_like(old, device="cpu")
                    made[id(old)] = torch.nn.Parameter(room, requires_grad=old.requires_grad)
                module._parameters[name] = made[id(old)]
