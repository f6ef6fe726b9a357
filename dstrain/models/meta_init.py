"""Model construction on the meta device, without allocating or initializing parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from dstrain.models.patches import parameters_on_meta

_META_INIT = ContextVar("_META_INIT", default=False)
_RANDOM_INIT_FOLDERS: ContextVar[list[str] | None] = ContextVar("_RANDOM_INIT_FOLDERS", default=None)


def is_meta_init() -> bool:
    """Return True inside `meta_parameters`."""
    return _META_INIT.get()


def allow_random_init(folder: str) -> bool:
    """Return True inside `weights_loaded_later`, and record that the weights of this folder are initialized."""
    folders = _RANDOM_INIT_FOLDERS.get()
    # None outside of the context: there missing weights are an error.
    if folders is not None:
        folders.append(folder)
    return folders is not None


@contextmanager
def weights_loaded_later() -> Iterator[list[str]]:
    """Let `load_model` initialize the weights of a folder that has a config but no weights, inside the context.

    For models whose weights are all replaced by a checkpoint's afterwards. Yields the list of these folders.
    """
    folders: list[str] = []
    token = _RANDOM_INIT_FOLDERS.set(folders)
    try:
        yield folders
    finally:
        _RANDOM_INIT_FOLDERS.reset(token)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Create parameters on the meta device inside the context, so that they take no memory; buffers are not affected.

    `load_model` then reads only the config of a folder, no weights. Not thread-safe. Tied parameters stay tied;
    accelerate's `init_empty_weights` (1.15) creates a new parameter for each module, and so unties them.
    """
    token = _META_INIT.set(True)
    try:
        with parameters_on_meta():
            yield
    finally:
        _META_INIT.reset(token)


def materialize(model: torch.nn.Module) -> None:
    """Allocate uninitialized host memory for every parameter on the meta device."""
    new: dict[int, torch.nn.Parameter] = {}  # by id of the old one, so that tied parameters stay tied
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.device.type == "meta":
                if id(old) not in new:
                    values = torch.empty_like(old, device="cpu")
                    new[id(old)] = torch.nn.Parameter(values, requires_grad=old.requires_grad)
                module._parameters[name] = new[id(old)]
