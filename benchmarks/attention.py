"""Measure attention of groups with a shared prefix: blocks of queries, torch's kernel, and the sequences as padded rows.

python -m benchmarks.attention --threads 1 [--heads 32 --kv-heads 8 --width 128]
On a CPU, seconds of the process, which other jobs on the machine change less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.common import join_alone, ratio, run, take_turns
from dstrain.batch import PackedGroup
from dstrain.models.attention import by_group
from dstrain.models.attention.by_group import Heads
from dstrain.models.attention.layout import AttentionSettings, PackedLayout
from dstrain.models.attention.packed import AttentionCall, Kernel, choose_kernel

GROUPS = (
    (PackedGroup(64, (32, 32)),),
    (PackedGroup(100, (70, 70)),),
    (PackedGroup(200, (100, 100)),),
    (PackedGroup(50, (400, 400)),),
    (PackedGroup(800, (100, 100)),),
    (PackedGroup(600, (700, 700)),),
    (PackedGroup(0, (40,)),) * 8,
    (PackedGroup(0, (256,)),) * 4,
)
"""Groups of 128 to 2000 tokens, with two branches or none that share."""
BLOCKS = (64, 96, 128, 192, 256)
"""Queries of a block."""
Pass = Callable[[], list[torch.Tensor]]
"""Returns the output of the packed row's tokens (T, H, D) and the gradients of query, key and value (T, …)."""


def packed_pass(
    heads: list[torch.Tensor], weights: torch.Tensor, groups: tuple[PackedGroup, ...], kernel: Kernel | None = None
) -> Pass:
    """Return a pass over the packed row: heads (T, H or G, D), weights (T, H, D). `kernel` None: the device's."""

    def go() -> list[torch.Tensor]:
        leaves = [one.detach().requires_grad_() for one in heads]
        inputs = [one.unsqueeze(0).transpose(1, 2) for one in leaves]
        settings = AttentionSettings()
        chosen = kernel or choose_kernel("sdpa", AttentionCall.of(inputs, settings))
        out = chosen(inputs, settings, PackedLayout(groups))[0]
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    return go


def padded_pass(heads: list[torch.Tensor], weights: torch.Tensor, groups: tuple[PackedGroup, ...]) -> Pass:
    """Return a pass over the same sequences as rows padded to the longest, each with its own prefix."""
    rows, seen = [], []
    start = 0
    for group in groups:
        begin = start + group.prefix
        for number, branch in enumerate(group.branches):
            rows.append([*range(start, start + group.prefix), *range(begin, begin + branch)])
            seen.append([number == 0] * group.prefix + [True] * branch)
            begin += branch
        start = begin
    longest = max(map(len, rows))
    index = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=weights.device)  # (B, L)
    counts = torch.tensor([row + [False] * (longest - len(row)) for row in seen], device=weights.device)  # (B, L)
    rows_weights = weights[index] * counts[..., None, None]

    def go() -> list[torch.Tensor]:
        leaves = [one.detach().requires_grad_() for one in heads]
        query, key, value = (one[index].transpose(1, 2) for one in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        ).transpose(1, 2)
        return [out.detach()[counts], *torch.autograd.grad((out * rows_weights).sum(), leaves)]

    return go


def sdpa_by_segment(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention (1, T, H, D) by torch's kernel: one call for each prefix and each branch."""
    found = []
    sizes = [segment.length for segment in layout.segments]
    for segment, query, *own in zip(layout.segments, *(one.split(sizes, dim=2) for one in heads), strict=True):
        begin, end = segment.prefix_start, segment.prefix_start + segment.prefix
        key, value = (torch.cat((all_[:, :, begin:end], one), 2) for all_, one in zip(heads[1:], own, strict=True))
        mask = None
        if segment.prefix:
            seen = torch.ones(segment.length, segment.prefix + segment.length, dtype=torch.bool, device=query.device)
            hidden = ~seen.tril(segment.prefix)
            mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, float("-inf"))
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
            )
        )
    return torch.cat(found, dim=2).transpose(1, 2)


def with_blocks_of(go: Pass, queries: int) -> Callable[[int], Any]:
    """Return the pass with another number of queries in a block."""

    def turn(_turn: int) -> Any:
        with mock.patch.object(by_group, "QUERY_BLOCK", queries):
            return go()

    return turn


def measure(
    *, heads: int = 4, kv_heads: int = 2, width: int = 64, rounds: int = 6, shortest: bool = False
) -> dict[str, Any]:
    """Check that outputs and gradients are equal, then time them in turns; bf16, forward and backward."""
    device, rows, furthest = join_alone().device, [], 0.0
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for groups in GROUPS[:1] if shortest else GROUPS:
        tokens = sum(group.tokens for group in groups)
        torch.manual_seed(0)
        inputs = [torch.randn(tokens, count, width, device=device) for count in (heads, kv_heads, kv_heads)]
        weights = torch.randn(tokens, heads, width, device=device)
        pairs = zip(packed_pass(inputs, weights, groups)(), padded_pass(inputs, weights, groups)(), strict=True)
        off = max(float((one - other).norm() / other.norm()) for one, other in pairs)
        assert off <= 1e-5, f"{groups}: packed and padded differ by {off:.1e} in fp32"
        furthest = max(furthest, off)
        half = [one.bfloat16() for one in inputs]
        packed, padded = (make(half, weights.bfloat16(), groups) for make in (packed_pass, padded_pass))
        sdpa = packed_pass(half, weights.bfloat16(), groups, sdpa_by_segment)
        runners = {"padded": lambda _turn, go=padded: go(), "sdpa": lambda _turn, go=sdpa: go()}
        runners |= {f"blocks of {size}": with_blocks_of(packed, size) for size in BLOCKS}
        seconds = take_turns(runners, rounds, 1, device, clock)
        name = f"{len(groups)} x {'+'.join(map(str, (groups[0].prefix, *groups[0].branches)))}"
        for variant in [*runners][1:]:
            rows.append({"group": name, "variant": variant, **ratio(seconds, variant, "padded")})
    return {
        "settings": {"heads": heads, "kv_heads": kv_heads, "width": width, "rounds": rounds},
        "checked": f"outputs and gradients of packed and padded rows differ by at most {furthest:.1e} in fp32",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
