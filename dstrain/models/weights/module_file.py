"""A module of the user's own in a folder: all of its state in one model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.errors import CheckpointError
from dstrain.models.params.zero3 import assign, full_shape
from dstrain.models.weights.files import open_tensors

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model.safetensors"


def save_module(model: torch.nn.Module, folder: Path) -> None:
    """Write the state dict; what the module shares under several names comes once, under the first."""
    from safetensors.torch import save_file

    tensors, storages = {}, set()
    for names, tensor in _iter_unique_tensors(model):
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage().data_ptr()
        tensors[names[0]] = value.clone() if storage in storages else value  # views of one buffer are written apart
        storages.add(storage)
    save_file(tensors, str(folder / MODEL_FILE), metadata={"format": "pt"})


def load_module(model: torch.nn.Module, folder: Path) -> None:
    """Put the file's values into the module. Raises CheckpointError where names or shapes differ. Collective under ZeRO-3."""
    file = folder / MODEL_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: holds no {MODEL_FILE}; export the run again")
    stored, wanted = open_tensors([file]), {names[0]: tensor for names, tensor in _iter_unique_tensors(model)}
    if odd := sorted(stored.keys() ^ wanted.keys()):
        where = "the task's model" if odd[0] in stored else "the file"
        raise CheckpointError(f"{file}: {odd[0]} is not in {where}; give the task file and the options of the export")
    for name, tensor in wanted.items():
        if stored[name].shape != full_shape(tensor):
            shapes = f"{stored[name].shape} there and {full_shape(tensor)} in the task's model"
            raise CheckpointError(f"{file}: {name} is {shapes}; give the options of the export")
        assign(tensor, stored[name].read)


def _iter_unique_tensors(model: torch.nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Each tensor of the state with all of its names."""
    import torch

    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), ([], value))[0].append(name)
    yield from found.values()
