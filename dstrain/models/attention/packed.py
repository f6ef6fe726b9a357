"""Packed batches in transformers models: the attention function, and the model's keyword arguments."""

# Shapes: T tokens of the packed row, H heads, G key-value heads, D width of a head.

from __future__ import annotations

from typing import Any

import torch

from dstrain.batch import Batch, PackedGroup
from dstrain.models.params.components import unwrap_peft

PREFIX = "packed_"
FAMILIES = frozenset({"llama"})


def find_packing_obstacle(config: Any, shares_prefix: bool) -> str | None:
    """Return why a model of this config cannot take packed batches, or None. `shares_prefix`: groups have prefixes."""
    model_type = getattr(config, "model_type", "")
    return None if model_type in FAMILIES else f"packed batches are not tested with models of type {model_type}"


def enable_packed_attention(model: torch.nn.Module) -> None:
    """Let the model's attention read `packed_groups`; batches that are not packed run as before. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(f"{PREFIX}sdpa", packed_attention_forward)
    AttentionMaskInterface.register(f"{PREFIX}sdpa", sdpa_mask)
    core: Any = unwrap_peft(model)
    core.set_attn_implementation(f"{PREFIX}sdpa")


def packed_model_kwargs(batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward pass for a packed batch, besides `input_ids`."""
    positions = batch.tensors["position_ids"]
    # transformers returns a 4D mask as it is: no (T, T) mask, and no sequences guessed from jumps in the positions.
    placeholder = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=positions.device)
    return {"position_ids": positions, "attention_mask": placeholder, "packed_groups": batch.groups}


def packed_attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. `query` (1, H, T, D), `key` and `value` (1, G, T, D); returns (1, T, H, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups = kwargs.pop("packed_groups", None)
    if groups is None:
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    sizes = [size for group in groups for size in (group.prefix, *group.branches)]
    pieces = iter(zip(*(one.split(sizes, dim=2) for one in (query, key, value)), strict=True))
    found = [out for group in groups for out in _attend_group(group, pieces, kwargs.get("scaling"))]
    return torch.cat(found, dim=2).transpose(1, 2), None


def _attend_group(group: PackedGroup, pieces: Any, scale: float | None) -> Any:
    attend = torch.nn.functional.scaled_dot_product_attention
    query, prefix_key, prefix_value = next(pieces)
    if group.prefix:
        yield attend(query, prefix_key, prefix_value, is_causal=True, scale=scale, enable_gqa=True)
    for length in group.branches:
        query, key, value = next(pieces)
        if not group.prefix:
            yield attend(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
            continue
        key, value = torch.cat((prefix_key, key), 2), torch.cat((prefix_value, value), 2)
        mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=query.device).tril(group.prefix)
        yield attend(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
