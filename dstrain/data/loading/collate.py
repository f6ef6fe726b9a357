"""Padding, attention masks and loss masks of sequences of different lengths."""

# Shapes: B rows (samples), L tokens of the longest row, K tokens from the first target of any row
# to the end of the padded rows, N targets.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from dstrain.batch import PackedGroup

Sequences = Sequence[Sequence[int] | np.ndarray]


@dataclass(frozen=True)
class PaddedRows:
    """Sequences as rows of equal length, padded on the right; `dstrain.data.loading.packing.PackedRows` has the same methods."""

    sequences: Sequences
    pad_token_id: int

    @property
    def groups(self) -> tuple[PackedGroup, ...]:
        """None: the rows are not packed."""
        return ()

    def input_tensors(self) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask`, (B, L) int64 each."""
        return {
            "input_ids": pad(self.sequences, self.pad_token_id),
            "attention_mask": attention_mask(self.sequences),
        }

    def target_tensors(self, loss_masks: Sequences) -> dict[str, torch.Tensor]:
        """Return `learnt`, (B, K), and `loss_positions`, (N, 2), of loss masks as long as their sequences."""
        loss_mask = loss_mask_tail(loss_masks)
        return {"learnt": loss_mask, "loss_positions": loss_positions(loss_mask, padded_length(self.sequences))}

    def score_tensors(self, pad_token_ids: Mapping[str, int | None]) -> dict[str, torch.Tensor]:
        """Return nothing: a reward model finds the end of a padded row by its pad token."""
        return {}


def pad(sequences: Sequences, value: int, multiple_of: int = 1) -> torch.Tensor:
    """Return the sequences as (B, L) int64, padded on the right with the value; L is rounded up to the multiple."""
    import torch

    table = np.full((len(sequences), padded_length(sequences, multiple_of)), value, dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(table)  # (B, L)


def attention_mask(sequences: Sequences, multiple_of: int = 1) -> torch.Tensor:
    """Return (B, L) int64, 1 for the tokens of `pad` and 0 for its padding."""
    import torch

    lengths = np.array([len(sequence) for sequence in sequences])
    table = np.arange(padded_length(sequences, multiple_of)) < lengths[:, None]
    return torch.from_numpy(table.astype(np.int64))  # (B, L)


def loss_mask_tail(loss_masks: Sequences) -> torch.Tensor:
    """Return the last K columns of padded loss masks of 0 and 1, (B, K) int64.

    K is the smallest that includes every 1: no logits are needed for the columns before.
    """
    table = pad(loss_masks, 0)  # (B, L)
    columns = table.any(0).nonzero()  # (columns with a target, 1), ascending
    # One column remains without any target: K is never 0.
    return table[:, int(columns[0]) if len(columns) else -1 :].contiguous()


def answer_mask_tail(answers: Sequence[tuple[Sequence[int] | np.ndarray, int]]) -> torch.Tensor:
    """Return `loss_mask_tail`, (B, K), of sequences given with the index where their answer starts.

    The first token of a sequence is not a target, because there is nothing to predict it from.
    """
    return loss_mask_tail(answer_masks(answers))


def answer_masks(answers: Sequence[tuple[Sequence[int] | np.ndarray, int]]) -> list[np.ndarray]:
    """Return the loss mask of each sequence given with the index where its answer starts: 1 from there to its end."""
    return [(np.arange(len(ids)) >= max(begin, 1)).astype(np.int64) for ids, begin in answers]


def loss_positions(loss_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return row and column of each target in padded sequences (B, length), (N, 2) int64.

    `loss_mask`: (B, K), as `loss_mask_tail` returns it. Call it on the host: on a GPU, `nonzero`
    waits for all earlier work to learn the number of targets.
    """
    import torch

    return loss_mask.nonzero() + torch.tensor([0, length - loss_mask.shape[1]], device=loss_mask.device)


def padded_length(sequences: Sequences, multiple_of: int = 1) -> int:
    """Return the length of the longest sequence, rounded up to the multiple, L."""
    longest = max(len(sequence) for sequence in sequences)
    return -(-longest // multiple_of) * multiple_of
