"""Sequences of different lengths as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Sequences = Sequence[Sequence[int] | np.ndarray]


def pad(sequences: Sequences, value: int, multiple_of: int = 1) -> torch.Tensor:
    """(B, L) int64, filled up on the right with the value; L is the longest, rounded up to the multiple."""
    import torch

    length = padded_length(sequences, multiple_of)
    table = np.full((len(sequences), length), value, dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(table)  # (B, L)


def attention_mask(sequences: Sequences, multiple_of: int = 1) -> torch.Tensor:
    """(B, L) int64, 1 where `pad` keeps a token and 0 where it fills up."""
    import torch

    lengths = np.array([len(sequence) for sequence in sequences])
    table = np.arange(padded_length(sequences, multiple_of)) < lengths[:, None]
    return torch.from_numpy(table.astype(np.int64))  # (B, L)


def padded_length(sequences: Sequences, multiple_of: int = 1) -> int:
    """The longest length, rounded up to the multiple."""
    longest = max(len(sequence) for sequence in sequences)
    return -(-longest // multiple_of) * multiple_of
