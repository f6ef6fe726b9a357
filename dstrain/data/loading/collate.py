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


def loss_mask_tail(loss_masks: Sequences) -> torch.Tensor:
    """(B, K) int64 from a sequence of 0 and 1 for each token: the last K places of the padded sequences.

    K is as small as it can be with every 1 inside.
    """
    table = pad(loss_masks, 0)  # (B, L)
    columns = table.any(0).nonzero()
    return table[:, int(columns[0]) if len(columns) else -1 :].contiguous()


def answer_mask_tail(answers: Sequence[tuple[Sequence[int] | np.ndarray, int]]) -> torch.Tensor:
    """(B, K) as `learnt_tail`, from each sequence and where its answer begins.

    Nothing predicts the first token of a sequence: an answer that fills it whole is learnt from its second on.
    """
    starts = [max(begin, 1) for _, begin in answers]
    return loss_mask_tail(
        [[0] * start + [1] * (len(ids) - start) for (ids, _), start in zip(answers, starts, strict=True)]
    )


def loss_positions(loss_mask: torch.Tensor, length: int) -> torch.Tensor:
    """(N, 2) int64: row and column of each token of padded sequences (B, length) that is learnt; `learnt` as above.

    Made on the host: on a device nobody knows their number before all earlier work is done.
    """
    import torch

    return loss_mask.nonzero() + torch.tensor([0, length - loss_mask.shape[1]], device=loss_mask.device)


def padded_length(sequences: Sequences, multiple_of: int = 1) -> int:
    """The longest length, rounded up to the multiple."""
    longest = max(len(sequence) for sequence in sequences)
    return -(-longest // multiple_of) * multiple_of
