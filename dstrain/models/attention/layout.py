"""The layout of a packed batch: its segments, the index tensors of kernels, and masks that the layers share."""

# Shapes: T tokens of the packed row, K tokens of all keys if each branch has a copy of its prefix, S segments.

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from dstrain.batch import PackedGroup


class Segment(NamedTuple):
    """Consecutive tokens of the packed row: a prefix or a branch."""

    start: int
    length: int
    prefix_start: int
    prefix: int
    """Tokens of the shared prefix that come before the segment; 0 for a prefix and for a plain sequence."""
    group: int
    branch: int
    """0 for a prefix, from 1 on for branches."""


class VarlenTensors(NamedTuple):
    """What varlen kernels take: segment i has queries cu_queries[i]:cu_queries[i + 1], and its own keys."""

    key_index: torch.Tensor | None
    """(K,) int64: the row's token of each key. None where the keys are the row's tokens."""
    cu_queries: torch.Tensor
    """(S + 1,) int32."""
    cu_keys: torch.Tensor
    """(S + 1,) int32."""
    max_queries: int
    max_keys: int


@dataclass(eq=False)
class PackedLayout:
    """The groups of one packed batch, and what the layers of a forward pass derive from them once."""

    groups: tuple[PackedGroup, ...]
    cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """Return build(), computed once per key."""
        if key not in self.cache:
            self.cache[key] = build()
        return self.cache[key]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Prefixes and branches with at least one token, in the order of their tokens."""
        found, start = [], 0
        for number, group in enumerate(self.groups):
            prefix_start = start
            for branch, length in enumerate((group.prefix, *group.branches)):
                if length:
                    found.append(Segment(start, length, prefix_start, group.prefix if branch else 0, number, branch))
                start += length
        return tuple(found)

    def index_tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each token's group, branch (0 in a prefix) and logical position; three (T,) int32 tensors."""
        return self.cached(("index", device), lambda: self._index_tensors(device))

    def _index_tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        lengths = torch.tensor([segment.length for segment in self.segments])
        groups = torch.tensor([segment.group for segment in self.segments]).repeat_interleave(lengths)
        branches = torch.tensor([segment.branch for segment in self.segments]).repeat_interleave(lengths)
        positions = torch.cat([torch.arange(one.prefix, one.prefix + one.length) for one in self.segments])
        groups, branches, positions = (one.int().to(device) for one in (groups, branches, positions))
        return groups, branches, positions

    def varlen_tensors(self, device: torch.device) -> VarlenTensors:
        """Return the index tensors of a varlen kernel, for keys that are gathered as [prefix; branch]."""
        return self.cached(("varlen", device), lambda: self._varlen_tensors(device))

    def _varlen_tensors(self, device: torch.device) -> VarlenTensors:
        import torch

        queries, keys = [one.length for one in self.segments], [one.prefix + one.length for one in self.segments]
        index = None
        if queries != keys:
            index = torch.cat([torch.cat([torch.arange(a, b) for a, b in _key_ranges(one)]) for one in self.segments])
            index = index.to(device)
        cu_queries, cu_keys = (
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device) for sizes in (queries, keys)
        )
        return VarlenTensors(index, cu_queries, cu_keys, max(queries), max(keys))


def _key_ranges(segment: Segment) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the ranges of the row's tokens that are keys of a segment: its prefix (may be empty) and itself."""
    prefix = segment.prefix_start, segment.prefix_start + segment.prefix
    return prefix, (segment.start, segment.start + segment.length)
