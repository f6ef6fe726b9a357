"""Attention of packed batches on any device: calls per group, in blocks of queries. The reference path."""

# Shapes: T tokens of the packed row, H heads, G key-value heads, D width of a head, N queries and K keys of a call.

# Measured by benchmarks/attention.py (bf16, forward and backward, a CPU with AVX512-BF16), figures in
# docs/measurements/README.md: up to 256 tokens one call with a mask takes 0.9 to 1.1 of the time of calls in blocks, with
# fewer calls; at 2000 tokens twice the time. Short sequences gain from a common call up to 96 tokens. Each block's keys
# end at its last query. torch's CPU kernel takes fewer key heads than query heads without copies.

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from dstrain.batch import PackedGroup
from dstrain.models.attention.layout import AttentionSettings, PackedLayout

MASKED_TOKENS = 256
"""Most tokens of a group with a prefix that is computed in one call with a mask."""
MERGED_TOKENS = 96
"""Most tokens of several groups in one call with a mask."""
QUERY_BLOCK = 256
"""Most queries of a call with a mask: bounds its memory to QUERY_BLOCK times the keys."""

Heads = Sequence[torch.Tensor]
"""Query (1, H, N, D), key (1, G, K, D) and value (1, G, K, D)."""


def attention_by_group(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D). `heads`: query (1, H, T, D), key and value (1, G, T, D)."""
    tiles = layout.cached("tiles", lambda: list(_tiles(layout.groups)))
    found: list[torch.Tensor] = []
    pieces = _split(heads, [sum(group.tokens for group in tile) for tile in tiles])
    for tile, piece in zip(tiles, pieces, strict=True):
        if len(tile) > 1 or (tile[0].prefix and tile[0].tokens <= MASKED_TOKENS):
            found.append(_sdpa(piece, settings, _tile_mask(tile, piece[0], settings.window, layout)))
        else:
            found.extend(_group_attention(tile[0], piece, settings, layout))
    return torch.cat([one.transpose(1, 2) for one in found], dim=1)  # each is (1, H, N, D)


def _tiles(groups: Sequence[PackedGroup]) -> Iterator[tuple[PackedGroup, ...]]:
    """Yield the groups in their order, short ones together."""
    tile: list[PackedGroup] = []
    for group in groups:
        if tile and sum(one.tokens for one in tile) + group.tokens > MERGED_TOKENS:
            yield tuple(tile)
            tile = []
        tile.append(group)
    if tile:
        yield tuple(tile)


def _split(heads: Heads, sizes: Sequence[int]) -> Iterator[Heads]:
    """Yield query, key and value of consecutive tokens.

    By `split`, not by slices: its backward pass is one concatenation, where each slice would add T tokens.
    """
    return zip(*(one.split(list(sizes), dim=2) for one in heads), strict=True)


def _tile_mask(
    tile: tuple[PackedGroup, ...], query: torch.Tensor, window: int | None, layout: PackedLayout
) -> torch.Tensor:
    """Return the mask (N, N) of groups that share a call."""

    def build() -> torch.Tensor:
        group, branch, position = PackedLayout(tile).index_tensors(query.device)
        distance = position[:, None] - position
        seen = (group[:, None] == group) & ((branch[:, None] == branch) | (branch == 0)) & (distance >= 0)
        return _to_float_mask(seen if window is None else seen & (distance < window), query.dtype)

    return layout.cached(("tile", tile, window, query.dtype), build)


def _group_attention(
    group: PackedGroup, heads: Heads, settings: AttentionSettings, layout: PackedLayout
) -> Iterator[torch.Tensor]:
    """Yield the attention of one group's segments in the order of their tokens, each (1, H, N, D)."""
    lengths = [length for length in (group.prefix, *group.branches) if length]
    segments = _split(heads, lengths)
    if not group.prefix:
        for segment in segments:
            yield from _causal_attention(segment, 0, settings, layout)
        return
    prefix = next(segments)
    yield from _causal_attention(prefix, 0, settings, layout)
    for query, *own in segments:
        keys = [torch.cat((shared, mine), dim=2) for shared, mine in zip(prefix[1:], own, strict=True)]
        yield from _causal_attention((query, *keys), group.prefix, settings, layout)


def _causal_attention(
    heads: Heads, prefix: int, settings: AttentionSettings, layout: PackedLayout
) -> Iterator[torch.Tensor]:
    """Yield the attention of N queries to prefix + N keys, where the last query sees the last key."""
    query, key, value = heads
    length, window = query.shape[2], settings.window
    unlimited = window is None or window >= prefix + length
    if unlimited and not prefix and not _is_explicit(settings):
        yield _sdpa(heads, settings, None, is_causal=True)
        return
    for start in range(0, length, QUERY_BLOCK):
        end = min(length, start + QUERY_BLOCK)
        first = 0 if unlimited or window is None else max(0, prefix + start - window + 1)
        piece = query[:, :, start:end], key[:, :, first : prefix + end], value[:, :, first : prefix + end]
        mask = _block_mask(piece[0], prefix + end - first, None if unlimited else window, layout)
        yield _sdpa(piece, settings, mask)


def _block_mask(query: torch.Tensor, keys: int, window: int | None, layout: PackedLayout) -> torch.Tensor | None:
    """Return the mask (N, K) of N queries whose last one sees the last of K keys; None if all see all."""
    queries = query.shape[2]
    if queries == 1:  # the keys begin with the first that it sees
        return None

    def build() -> torch.Tensor:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        if window is not None:
            seen = seen.triu(keys - queries - window + 1)
        return _to_float_mask(seen, query.dtype)

    return layout.cached(("block", queries, keys, window, query.dtype), build)


def _to_float_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where `seen`, else -inf, in the dtype of the heads: SDPA would convert a boolean mask in each call."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _is_explicit(settings: AttentionSettings) -> bool:
    return settings.is_eager or settings.needs_logits


def _sdpa(
    heads: Heads, settings: AttentionSettings, mask: torch.Tensor | None, is_causal: bool = False
) -> torch.Tensor:
    """Return the attention of one call, (1, H, N, D). `mask`: additive, (N, K)."""
    query, key, value = heads
    if _is_explicit(settings):
        return _masked_attention(heads, settings, mask)
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and mask is not None and query.device.type != "cpu":  # CUDA has no such kernel with a mask
        key, value = _repeat(key, query), _repeat(value, query)
        is_grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=settings.dropout, is_causal=is_causal, scale=settings.scale,
        enable_gqa=is_grouped,
    )  # fmt: skip


def _repeat(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return (1, H, K, D) of (1, G, K, D)."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _masked_attention(heads: Heads, settings: AttentionSettings, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the attention computed from its logits (1, H, N, K), softmax in fp32 at least."""
    query, key, value = heads
    scale = query.shape[-1] ** -0.5 if settings.scale is None else settings.scale
    logits = query @ _repeat(key, query).transpose(2, 3) * scale
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    if mask is not None:
        logits = logits + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    if settings.sinks is not None:
        sinks = settings.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, sinks), dim=-1).softmax(dim=-1, dtype=wide)[..., :-1]
    else:
        weights = logits.softmax(dim=-1, dtype=wide)
    weights = F.dropout(weights.to(query.dtype), p=settings.dropout)  # dropout is 0 outside of training
    return weights @ _repeat(value, query)
