"""Attention on the CPU in fp32, forward and backward: what the fused kernels of a GPU compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """What a call of attention asks for. Windows count keys to the left and right of a query's own; negative: all."""

    causal: bool = False
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1


def make_bias(queries: int, keys: int, options: Options, align_bottom: bool = True) -> Tensor:
    """Return 0 where a query sees a key and -inf elsewhere: (queries, keys).

    Flash attention aligns the last query with the last key (`align_bottom`), `scaled_dot_product_attention` the first
    ones.
    """
    offset = keys - queries if align_bottom else 0
    query = torch.arange(queries)[:, None] + offset
    key = torch.arange(keys)[None]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if options.causal:
        hidden |= key > query
    if options.window_left >= 0:
        hidden |= key < query - options.window_left
    if options.window_right >= 0:
        hidden |= key > query + options.window_right
    return torch.zeros(queries, keys).masked_fill(hidden, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return outputs (batch, heads, queries, width) and the logarithms of the softmax's sums (batch, heads, queries)."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * _scale(q, scale)
    if bias is not None:
        scores = scores + bias.float()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    heads = k.shape[1]
    groups = q.shape[1] // heads
    grad, q = grad.float(), q.float()
    k, v = k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    factor = _scale(q, scale)
    scores = q @ k.transpose(-1, -2) * factor
    if bias is not None:
        scores = scores + bias.float()
    shares = torch.softmax(scores, -1).nan_to_num(0.0)
    grad_shares = grad @ v.transpose(-1, -2)
    grad_scores = shares * (grad_shares - (grad_shares * shares).sum(-1, keepdim=True))
    grad_q = grad_scores @ k * factor
    grad_k = grad_scores.transpose(-1, -2) @ q * factor
    grad_v = shares.transpose(-1, -2) @ grad
    return grad_q, grad_k.unflatten(1, (heads, groups)).sum(2), grad_v.unflatten(1, (heads, groups)).sum(2)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _segments(cumulative_q: Tensor, cumulative_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence that is not empty."""
    q_ends, k_ends = cumulative_q.tolist(), cumulative_k.tolist()
    for index in range(len(q_ends) - 1):
        queries = slice(q_ends[index], q_ends[index + 1])
        if queries.stop > queries.start:
            yield queries, slice(k_ends[index], k_ends[index + 1])


def _as_batch(tensor: Tensor, rows: slice) -> Tensor:
    """Return (rows, heads, width) as (1, heads, rows, width)."""
    return tensor[rows].transpose(0, 1)[None]


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cumulative_q: Tensor, cumulative_k: Tensor, options: Options
) -> Tensor:
    """Return outputs (tokens, heads, width) of sequences that lie one behind the other; 0 behind the last."""
    output = torch.zeros(*q.shape[:-1], v.shape[-1])
    for queries, keys in _segments(cumulative_q, cumulative_k):
        bias = make_bias(queries.stop - queries.start, keys.stop - keys.start, options)
        result, _ = attend(_as_batch(q, queries), _as_batch(k, keys), _as_batch(v, keys), bias, options.scale)
        output[queries] = result[0].transpose(0, 1)
    return output


def attend_packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cumulative_q: Tensor, cumulative_k: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: (tokens, heads, width)."""
    grad_q, grad_k, grad_v = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    for queries, keys in _segments(cumulative_q, cumulative_k):
        bias = make_bias(queries.stop - queries.start, keys.stop - keys.start, options)
        parts = attend_backward(
            _as_batch(grad, queries), _as_batch(q, queries), _as_batch(k, keys), _as_batch(v, keys), bias, options.scale
        )
        for total, part, rows in zip((grad_q, grad_k, grad_v), parts, (queries, keys, keys), strict=True):
            total[rows] += part[0].transpose(0, 1)
    return grad_q, grad_k, grad_v
