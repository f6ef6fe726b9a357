"""Models without values in their parameters, for weights that come from elsewhere: nothing is drawn, nothing is held twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_EMPTY = ContextVar("_EMPTY", default=False)
_FOLLOW: ContextVar[list[str] | None] = ContextVar("_FOLLOW", default=None)


def without_values() -> bool:
    """Whether `no_values` is around this call."""
    return _EMPTY.get()


def may_draw(name: str) -> bool:
    """Whether `all_values_follow` is around this call; notes that the weights of this folder are drawn."""
    drawn = _FOLLOW.get()
    if drawn is not None:
        drawn.append(name)
    return drawn is not None


@contextmanager
def all_values_follow() -> Iterator[list[str]]:
    """Inside, `load_model` may draw the weights of a folder that has a config and no weights: all of them are about to be
    replaced by a checkpoint's. Yields the folders of which it did so.
    """
    drawn: list[str] = []
    token = _FOLLOW.set(drawn)
    try:
        yield drawn
    finally:
        _FOLLOW.reset(token)


@contextmanager
def no_values() -> Iterator[None]:
    """Inside, modules get parameters on the meta device, which take no memory; buffers are what they are.

    `load_model` then reads no weights of a folder, but its config.

    For one thread. Parameters that two modules share stay one, where the second gets what the first has; accelerate's
    `init_empty_weights` (1.15) makes a new one for each module and so takes ties apart.
    """
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_empty
    token = _EMPTY.set(True)
    try:
        yield
    finally:
        _EMPTY.reset(token)
        torch.nn.Module.register_parameter = register


def give_room(model: torch.nn.Module) -> None:
    """Give every parameter that is on the meta device memory on the host, with whatever lies there."""
    made: dict[int, torch.nn.Parameter] = {}  # what is shared stays shared
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.device.type == "meta":
                if id(old) not in made:
                    room = torch.empty_like(old, device="cpu")
                    made[id(old)] = torch.nn.Parameter(room, requires_grad=old.requires_grad)
                module._parameters[name] = made[id(old)]
