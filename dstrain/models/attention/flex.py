"""Attention of packed batches by FlexAttention, which skips the blocks that no query of a block sees."""

# Shapes: T tokens of the packed row, H heads, G key-value heads, D width of a head.

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from dstrain.models.attention.by_group import Heads
from dstrain.models.attention.layout import AttentionSettings, PackedLayout


def packed_flex_attention(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D). `heads`: query (1, H, T, D), key and value (1, G, T, D).

    FlexAttention: Dong et al. (arXiv 2412.05496). Compiled on a GPU. On a CPU it is not compiled, and computes all
    (T, T) logits: for tests only. It has no dropout.
    """
    query, key, value = heads
    block_mask = layout.cached(
        ("flex", settings.window, query.device), lambda: _block_mask(layout, settings.window, query.device)
    )
    attend = partial(
        _flex_attention(query.device.type), query, key, value,
        score_mod=None if settings.softcap is None else _softcap(settings.softcap), block_mask=block_mask,
        scale=settings.scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    out: torch.Tensor
    if settings.sinks is None:
        out = attend()
    else:
        from torch.nn.attention.flex_attention import AuxRequest  # from torch 2.9 on

        out, aux = attend(return_aux=AuxRequest(lse=True))
        # A sink adds exp(sink) to the denominator: out * exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(aux.lse - settings.sinks.to(aux.lse.dtype).view(1, -1, 1))  # (1, H, T)
        out = (out * share.unsqueeze(-1)).to(query.dtype)
    return out.transpose(1, 2)


@cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


@cache
def _softcap(softcap: float) -> Callable[..., torch.Tensor]:
    # One function per value, since a new function would be compiled again.
    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _block_mask(layout: PackedLayout, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    group, branch, position = layout.index_tensors(device)

    def is_seen(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = (branch[query] == branch[key]) | (branch[key] == 0)
        distance = position[query] - position[key]
        seen = (group[query] == group[key]) & own & (distance >= 0)
        return seen if window is None else seen & (distance < window)

    count = len(group)
    # Compiled on a GPU, where it would otherwise make a (T, T) mask.
    return create_block_mask(is_seen, None, None, count, count, device=device, _compile=device.type != "cpu")
