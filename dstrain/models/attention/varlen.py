"""Attention of packed batches by flash kernels for sequences of different lengths (GPU, 16 bits)."""

# Shapes: T tokens of the packed row, K keys if each branch has a copy of its prefix, H heads, G key-value heads, D width.

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dstrain.models.attention.by_group import Heads
from dstrain.models.attention.layout import AttentionSettings, PackedLayout, VarlenTensors

MAX_WIDTH = 256
"""Greatest width of a head of the flash kernels."""
MIN_CAPABILITY = (8, 0)
"""Compute capability from which torch's flash kernels run."""


def varlen_unsupported_reason(heads: Heads, settings: AttentionSettings) -> str | None:
    """Return why torch's varlen kernel cannot compute this call, or None."""
    query, _, value = heads
    if query.device.type != "cuda":
        return "it runs on CUDA devices"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {query.dtype}"
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > MAX_WIDTH or query.shape[-1] % 8:
        return "it needs heads of one width, a multiple of 8 and at most 256"
    if settings.dropout or settings.needs_logits:
        return "it has no dropout, softcap or sinks"
    if torch.cuda.get_device_capability(query.device) < MIN_CAPABILITY:
        return "it needs compute capability 8.0"
    return None if load_varlen_attn() is not None else "this torch has no varlen attention with windows"


@cache
def load_varlen_attn() -> Callable[..., torch.Tensor] | None:
    """Return torch's varlen_attn, or None where torch is older than its windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return (
        varlen_attn if {"window_size", "enable_gqa", "scale"} <= {*inspect.signature(varlen_attn).parameters} else None
    )


def packed_varlen_attention(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D), by torch's varlen_attn.

    Each branch gets a copy of its prefix's keys and values; the causal mask is aligned at the last query and key, so
    that windows count logical positions. FlashAttention-2: Dao (arXiv 2307.08691).
    """
    varlen_attn = load_varlen_attn()
    assert varlen_attn is not None, "varlen_unsupported_reason says so"
    query, keys, tensors = _gather(heads, layout)
    window = (-1, 0) if settings.window is None else (settings.window - 1, 0)
    out = varlen_attn(
        query[0], *(one[0] for one in keys), tensors.cu_queries, tensors.cu_keys, tensors.max_queries, tensors.max_keys,
        scale=settings.scale, window_size=window, enable_gqa=query.shape[2] != keys[0].shape[2],
    )  # fmt: skip
    return out.unsqueeze(0)


def packed_flash_attention(
    base: Callable[..., Any], module: torch.nn.Module, heads: Heads, layout: PackedLayout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D), by transformers' function of a flash package or kernel.

    `kwargs`: those of the layer. Positions are left out, since transformers would search them for sequences.
    """
    query, keys, tensors = _gather(heads, layout)
    kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
    kwargs |= {"cu_seq_lens_q": tensors.cu_queries, "cu_seq_lens_k": tensors.cu_keys}
    kwargs |= {"max_length_q": tensors.max_queries, "max_length_k": tensors.max_keys}
    query, key, value = (one.transpose(1, 2) for one in (query, *keys))
    out: torch.Tensor = base(module, query, key, value, None, **kwargs)[0]
    return out


def _gather(heads: Heads, layout: PackedLayout) -> tuple[torch.Tensor, list[torch.Tensor], VarlenTensors]:
    """Return query (1, T, H, D), key and value (1, K, G, D), and the kernel's index tensors."""
    query, *keys = (one.transpose(1, 2) for one in heads)
    tensors = layout.varlen_tensors(query.device)
    if tensors.key_index is not None:
        keys = [one.index_select(1, tensors.key_index) for one in keys]
    return query, keys, tensors
