"""Bitwise comparison of tensors: checkpoint, model, exported folder and its reload."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dstrain.errors import CheckpointError, describe_key_diff, first_names
from dstrain.models.adapters import expected_warnings_hidden
from dstrain.models.weights import open_tensors
from dstrain.training.state.files import SAFETENSORS_DTYPES, CheckpointReader
from dstrain.training.state.layout import WEIGHT_KEY
from dstrain.training.state.manifest import BLOCK_BYTES

# One tensor, or one block of it, is read at a time.


@dataclass(frozen=True)
class TensorDigest:
    """Shape, dtype and hash of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sha256: str


def check_matches_checkpoint(model: torch.nn.Module, reader: CheckpointReader) -> None:
    """Raise CheckpointError if a tensor of the model differs from the checkpoint's, cast to the model's dtype."""
    state = get_state_tensors(model)
    for name, shape in reader.shapes.items():
        if name not in state or tuple(state[name].shape) != shape:
            raise CheckpointError(f"{reader.checkpoint}: {name} is not in the model with its shape {shape}")
        flat = state[name].reshape(-1)
        step = max(1, BLOCK_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            stored = torch.empty_like(piece, device="cpu")
            reader.read_into(name, WEIGHT_KEY, stored, start)
            if not is_bitwise_equal(piece, stored):
                raise CheckpointError(f"{reader.checkpoint}: the values of {name} in the model differ")


def check_params_finite(model: torch.nn.Module) -> None:
    """Raise CheckpointError for a parameter with inf or nan."""
    for name, parameter in model.named_parameters():
        if not all(piece.isfinite().all() for piece in parameter.detach().reshape(-1).split(BLOCK_BYTES)):
            raise CheckpointError(f"{name} holds inf or nan; export an older checkpoint")


def get_state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> tensor of the model's state dict; a tied tensor has several names."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def get_export_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that an exported folder of this model must have, by their names in the files.

    For adapters these are peft's; some families of transformers use other names in files than in memory.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from transformers.core_model_loading import revert_weight_conversion

    from dstrain.models.reward_model import split_score_head

    if isinstance(model, PeftModel):
        with expected_warnings_hidden():
            return _check_all_trained_saved(model, get_peft_model_state_dict(model))
    base, beside = split_score_head(model)
    ignored = getattr(base, "_keys_to_ignore_on_save", None) or ()
    return (
        revert_weight_conversion(base, {k: v for k, v in get_state_tensors(base).items() if k not in ignored}) | beside
    )


def _check_all_trained_saved(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `saved`. Raises CheckpointError if peft leaves out a trained parameter."""
    # By address, since peft renames what it saves.
    saved_pointers = {value.data_ptr() for value in saved.values()}
    lost = [name for name, p in model.named_parameters() if p.requires_grad and p.data_ptr() not in saved_pointers]
    if lost:
        raise CheckpointError(
            f"{first_names(lost)} was trained in addition to the adapters, whose folder has no place for it; "
            "merge them (--merge-lora)"
        )
    return saved


def count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the total size in bytes; tied tensors count once."""
    firsts = {_storage_key(value): value for value in tensors.values()}
    return sum(value.numel() * value.element_size() for value in firsts.values())


def _storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tied tensors."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def check_exported_files(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError if a folder's files have missing, unexpected or different tensors; tied ones count once."""
    found = open_tensors(sorted(folder.glob("*.safetensors")))
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, value in expected.items():
        groups.setdefault(_storage_key(value), []).append(name)
    missing = [names[0] for names in groups.values() if not set(names) & found.keys()]
    unexpected = sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"the exported files do not match the model: {describe_key_diff(missing, unexpected)}; "
            "nothing was left there"
        )
    for name, stored in found.items():
        value = expected[name]
        ours = (tuple(value.shape), SAFETENSORS_DTYPES[value.dtype])
        if (stored.shape, stored.dtype) != ours:
            raise CheckpointError(
                f"{name} is {stored.shape} of {stored.dtype} in the exported files, and {ours[0]} of {ours[1]} "
                "in the model; nothing was left there"
            )
        if not is_bitwise_equal(value, stored.read()):
            raise CheckpointError(
                f"the values of {name} in the exported files differ from the model's; nothing was left there"
            )


def is_bitwise_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return true if two tensors of one shape and dtype have the same bytes: nan equals nan, 0 differs from -0."""
    return torch.equal(_as_bytes(tensor.cpu()), _as_bytes(other.cpu()))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Bytes, so that nan equals nan.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def compute_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorDigest]:
    """Return name -> digest; tied tensors are hashed once."""
    known: dict[tuple[Any, ...], TensorDigest] = {}
    return {
        name: known.get(_storage_key(value)) or known.setdefault(_storage_key(value), _compute_digest(value))
        for name, value in tensors.items()
    }


def _compute_digest(tensor: torch.Tensor) -> TensorDigest:
    return TensorDigest(
        tuple(tensor.shape), tensor.dtype, hashlib.sha256(memoryview(_as_bytes(tensor.cpu()).numpy())).hexdigest()
    )


def check_loaded_model(model: torch.nn.Module, expected: Mapping[str, TensorDigest]) -> None:
    """Raise CheckpointError if a reloaded model has missing, unexpected or different tensors.

    transformers initializes a missing tensor at random, with a warning only: the comparison of values finds it. The
    precision may be higher than expected (peft loads 16-bit adapters in fp32).
    """
    found = get_state_tensors(model)
    missing, unexpected = _sorted_diff(expected, found), _sorted_diff(found, expected)
    if missing or unexpected:
        raise CheckpointError(
            f"the reloaded model does not match: {describe_key_diff(missing, unexpected)}; nothing was written"
        )
    wrong = []
    known: dict[tuple[Any, ...], TensorDigest] = {}
    for name, value in found.items():
        key = (*_storage_key(value), expected[name].dtype)
        # Tied tensors are hashed once.
        if key not in known:
            known[key] = _compute_digest(value.to(expected[name].dtype))
        wrong += [] if known[key] == expected[name] else [name]
    if wrong:
        raise CheckpointError(f"the values of {first_names(wrong)} in the reloaded model differ; nothing was written")


def _sorted_diff(names: Collection[str], others: Collection[str]) -> list[str]:
    return sorted(set(names) - set(others))
