"""What the kernels of packed batches take: settings of a call; segments and index tensors of the packed row."""

# Shapes: T tokens of the packed row, K tokens of all keys if each branch has a copy of its prefix, S segments.

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from dstrain.device_copies import copy_to_device

if TYPE_CHECKING:
    import torch

    from dstrain.batch import PackedGroup
    from dstrain.distributed.world import SequenceGroup


@dataclass(frozen=True)
class AttentionSettings:
    """Everything of an attention call besides query, key and value, as transformers' layers give it."""

    scale: float | None = None
    """Factor of the logits; None: one over the square root of the head's width."""
    dropout: float = 0.0
    window: int | None = None
    """A token attends to itself and to the window - 1 positions before it; None: to all."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap): Gemma 2 (arXiv 2408.00118), section 2."""
    sinks: torch.Tensor | None = None
    """(H,): a logit per head that takes part in the softmax and has no value: gpt-oss (arXiv 2508.10925)."""
    is_eager: bool = False
    """True: compute the logits explicitly, without a fused kernel."""

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any], is_eager: bool) -> Self:
        """Return the settings of a call of transformers' attention interface."""
        return cls(
            scale=kwargs.get("scaling"), dropout=kwargs.get("dropout") or 0.0, window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"), is_eager=is_eager,
        )  # fmt: skip

    @property
    def needs_logits(self) -> bool:
        """True if the logits or their sum are changed, which SDPA cannot do."""
        return self.softcap is not None or self.sinks is not None


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
    sequence: SequenceGroup | None = None
    """Processes of which each computes a part of the row's tokens, except in attention: there, a part of the heads."""
    cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """Return build(), computed once per key."""
        if key not in self.cache:
            self.cache[key] = build()
        return self.cache[key]

    @cached_property
    def tokens(self) -> int:
        """Tokens of the packed row, T."""
        return sum(group.tokens for group in self.groups)

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
        lengths = [segment.length for segment in self.segments]
        groups, branches = (
            np.repeat([getattr(segment, name) for segment in self.segments], lengths) for name in ("group", "branch")
        )
        positions = np.concatenate([np.arange(one.prefix, one.prefix + one.length) for one in self.segments])
        first, second, third = (copy_to_device(one.astype(np.int32), device) for one in (groups, branches, positions))
        return first, second, third

    def sequence_counts(self, device: torch.device) -> torch.Tensor:
        """Return the number of sequences that hold each token: the branches of its prefix, else 1; (T,) int32."""
        return self.cached(("sequences", device), lambda: self._sequence_counts(device))

    def _sequence_counts(self, device: torch.device) -> torch.Tensor:
        counts = [1 if one.branch else len(self.groups[one.group].branches) for one in self.segments]
        return copy_to_device(np.repeat(counts, [one.length for one in self.segments]).astype(np.int32), device)

    def sequence_numbers(self, device: torch.device) -> torch.Tensor:
        """Return the number of each token's segment, (1, T) int32."""

        def build() -> torch.Tensor:
            lengths = [segment.length for segment in self.segments]
            return copy_to_device(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None], device)

        return self.cached(("numbers", device), build)

    def varlen_tensors(self, device: torch.device) -> VarlenTensors:
        """Return the index tensors of a varlen kernel, for keys that are gathered as [prefix; branch]."""
        return self.cached(("varlen", device), lambda: self._varlen_tensors(device))

    def _varlen_tensors(self, device: torch.device) -> VarlenTensors:
        queries, keys = [one.length for one in self.segments], [one.prefix + one.length for one in self.segments]
        index = None
        if queries != keys:
            ranges = [np.arange(*both) for segment in self.segments for both in _key_ranges(segment)]
            index = copy_to_device(np.concatenate(ranges), device)
        cu_queries, cu_keys = (
            copy_to_device(np.cumsum([0, *sizes]).astype(np.int32), device) for sizes in (queries, keys)
        )
        return VarlenTensors(index, cu_queries, cu_keys, max(queries), max(keys))


def _key_ranges(segment: Segment) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the ranges of the row's tokens that are keys of a segment: its prefix (may be empty) and itself."""
    prefix = segment.prefix_start, segment.prefix_start + segment.prefix
    return prefix, (segment.start, segment.start + segment.length)
