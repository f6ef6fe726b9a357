"""Attention of packed batches on a CPU, in blocks of queries; the reference of the other kernels on any device."""

# Shapes: T tokens of the packed row, H heads, G key-value heads, R = H / G heads that share one, D width of a head
# (DeepSeek's values have another), N queries and K keys of a block.

# Why not SDPA: torch's kernel for a CPU takes about twice the time of plain products in bf16, and in fp32 the same
# (benchmarks/attention.py; docs/measurements/speed.md).

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dstrain.models.attention.layout import AttentionSettings, PackedLayout, Segment
from dstrain.models.chunk_sizes import QUERY_BLOCK, SAVED_BYTES

Heads = Sequence[torch.Tensor]
"""Query (1, H, T, D), key (1, G, T, D) and value (1, G, T, D)."""


class Block(NamedTuple):
    """Consecutive queries of a segment, and their keys, whose positions are consecutive too."""

    queries: slice
    keys: tuple[slice, ...]
    """One or two parts of the row. The last query sees the last key."""


def attention_by_group(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D). `heads`: query (1, H, T, D), key and value (1, G, T, D)."""
    if settings.is_eager or settings.needs_logits or settings.dropout:
        return _explicit_attention(heads, settings, layout)
    out: torch.Tensor = _BlockAttention.apply(*heads, settings, layout)
    return out


def blocks_of(layout: PackedLayout, window: int | None) -> list[Block]:
    """Return the blocks of a row in the order of their queries."""

    def build() -> list[Block]:
        return [block for segment in layout.segments for block in _split_segment(segment, window)]

    found: list[Block] = layout.cached(("blocks", window), build)
    return found


def _split_segment(segment: Segment, window: int | None) -> Iterator[Block]:
    start, prefix = segment.start, segment.prefix
    for first in range(0, segment.length, QUERY_BLOCK):
        last = min(segment.length, first + QUERY_BLOCK)
        # The position of the first key that the first query sees.
        seen = 0 if window is None else max(0, prefix + first - window + 1)
        own = slice(start + max(0, seen - prefix), start + last)
        shared = slice(segment.prefix_start + seen, segment.prefix_start + prefix)
        if seen >= prefix:
            keys: tuple[slice, ...] = (own,)
        elif shared.stop == own.start:
            keys = (slice(shared.start, own.stop),)
        else:
            keys = shared, own
        yield Block(slice(start + first, start + last), keys)


def _take(tokens: torch.Tensor, places: Sequence[slice]) -> torch.Tensor:
    """Return the tokens at these places: (…, T, D) -> (…, K, D)."""
    parts = [tokens[..., one, :] for one in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _add(total: torch.Tensor, places: Sequence[slice], tokens: torch.Tensor) -> None:
    """Add (…, K, D) to the tokens at these places in (…, T, D)."""
    parts = tokens.split([one.stop - one.start for one in places], dim=-2)
    for one, part in zip(places, parts, strict=True):
        total[..., one, :] += part


def _hide(logits: torch.Tensor, window: int | None, layout: PackedLayout) -> torch.Tensor:
    """Set the logits (…, N, K) of keys that a query does not see to -inf, in place.

    The last query sees the last key, so that with no window only the last N keys can be hidden from any query.
    """
    queries, keys = logits.shape[-2:]
    if queries == 1:  # its keys begin with the first that it sees
        return logits
    visible = logits[..., keys - queries :] if window is None else logits

    def build() -> torch.Tensor:
        hidden = torch.ones(visible.shape[-2:], dtype=torch.bool, device=logits.device)
        seen = hidden.tril(visible.shape[-1] - queries)
        if window is not None:
            seen = seen.triu(keys - queries - window + 1)
        return logits.new_zeros(visible.shape[-2:]).masked_fill_(~seen, float("-inf"))

    # Addition is faster than masked_fill_ with a mask that is broadcast.
    visible += layout.cached(("hidden", *visible.shape[-2:], window, logits.dtype, logits.device), build)
    return logits


class _BlockAttention(torch.autograd.Function):
    """softmax(scale * Q K^T) V of each block, with logits and softmax in fp32 at least.

    Heads that share a key-value head are further queries of it, so that keys and values are not repeated.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionSettings,
        layout: PackedLayout,
    ) -> torch.Tensor:  # fmt: skip
        rows = _Rows(query, key, settings, layout)
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])  # (1, T, H, D)
        by_head = rows.split_heads(out.transpose(1, 2))
        saved: list[torch.Tensor] = []
        room = SAVED_BYTES
        for block in rows.blocks:
            weights = rows.weights(block)
            found = torch.bmm(weights, _take(value[0], block.keys))  # (G, R N, D)
            by_head[:, :, block.queries] = found.unflatten(1, (rows.shared, -1))
            room -= weights.nbytes
            if room >= 0:
                saved.append(weights)
        ctx.save_for_backward(query, key, value, *saved)
        ctx.settings, ctx.layout = settings, layout
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        rows = _Rows(query, key, ctx.settings, ctx.layout)
        by_head = rows.split_heads(query)  # (G, R, T, D)
        grad_out = rows.split_heads(grad.transpose(1, 2))
        grad_query = torch.empty_like(by_head, memory_format=torch.contiguous_format)
        # Sums over blocks, hence not in 16 bits.
        grad_key, grad_value = (torch.zeros_like(one[0], dtype=rows.dtype) for one in (key, value))
        for number, block in enumerate(rows.blocks):
            weights = saved[number] if number < len(saved) else rows.weights(block)  # (G, R N, K)
            queries = block.queries
            grad_block = grad_out[:, :, queries].flatten(1, 2)  # (G, R N, D)
            _add(grad_value, block.keys, torch.bmm(weights.transpose(1, 2), grad_block))
            grad_weights = torch.bmm(grad_block, _take(value[0], block.keys).transpose(1, 2))
            grad_logits = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            found = torch.bmm(grad_logits, _take(key[0], block.keys))
            grad_query[:, :, queries] = found.unflatten(1, (rows.shared, -1))
            _add(grad_key, block.keys, torch.bmm(grad_logits.transpose(1, 2), by_head[:, :, queries].flatten(1, 2)))
        grads = grad_query.flatten(0, 1).mul_(rows.scale), grad_key.mul_(rows.scale).to(key.dtype), grad_value
        return *(one.to(query.dtype).unsqueeze(0) for one in grads), None, None


class _Rows:
    """Query and key of a packed row, and the blocks."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, settings: AttentionSettings, layout: PackedLayout
    ) -> None:
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.scale = query.shape[-1] ** -0.5 if settings.scale is None else settings.scale
        self.shared = query.shape[1] // key.shape[1]
        self.blocks = blocks_of(layout, settings.window)
        self._window, self._layout = settings.window, layout
        self._query, self._key = query, key

    def split_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Return (1, H, T, D) as (G, R, T, D)."""
        return heads[0].unflatten(0, (-1, self.shared))

    @cached_property
    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query (G, R, T, D) and key (G, T, D) in the type of the logits."""
        return self.split_heads(self._query).to(self.dtype), self._key[0].to(self.dtype)

    def weights(self, block: Block) -> torch.Tensor:
        """Return the attention weights of a block, (G, R N, K), in the type of the heads."""
        query, key = self._wide
        queries = query[:, :, block.queries].flatten(1, 2)  # (G, R N, D)
        keys = _take(key, block.keys).transpose(1, 2)  # (G, D, K)
        # The product is scaled, not the query, as in torch's kernels: the rounding of padded rows is met more closely.
        logits = torch.bmm(queries, keys).mul_(self.scale)
        _hide(logits.unflatten(1, (self.shared, -1)), self._window, self._layout)
        return logits.softmax(dim=-1).to(self._query.dtype)


def _explicit_attention(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention by torch's own gradients: with softcap, sinks or dropout."""
    query, key, value = heads
    found = []
    for block in blocks_of(layout, settings.window):
        queries = _take(query, (block.queries,))
        found.append(_masked_attention(queries, (_take(key, block.keys), _take(value, block.keys)), settings, layout))
    return torch.cat(found, dim=2).transpose(1, 2)


def _masked_attention(
    query: torch.Tensor, keys: Heads, settings: AttentionSettings, layout: PackedLayout
) -> torch.Tensor:
    """Return the attention of N queries (1, H, N, D) to keys and values (1, G, K, D), softmax in fp32 at least."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in keys)
    scale = query.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    logits = query @ key.transpose(2, 3) * scale
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    logits = _hide(logits.clone(), settings.window, layout)
    wide = torch.promote_types(query.dtype, torch.float32)
    if settings.sinks is not None:
        sinks = settings.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, sinks), dim=-1).softmax(dim=-1, dtype=wide)[..., :-1]
    else:
        weights = logits.softmax(dim=-1, dtype=wide)
    weights = F.dropout(weights.to(query.dtype), p=settings.dropout)  # dropout is 0 outside of training
    return weights @ value
