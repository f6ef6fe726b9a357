"""Packing of sequences into one row without padding; sequences with a common beginning may share it."""

# Shapes: R sequences, T tokens of the packed row, K targets from the first of any sequence to the end of the longest
# (as in collate.py), N targets.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dstrain.batch import PackedGroup
from dstrain.data.loading.collate import Sequences, loss_mask_tail

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PackedRows:
    """Sequences in one row of T tokens, and where each of their tokens is."""

    sequences: tuple[np.ndarray, ...]
    """Token ids of each sequence, in the order of the answers of a loss."""
    groups: tuple[PackedGroup, ...]
    indices: tuple[np.ndarray, ...]
    """Of each sequence: the index in the packed row of each of its tokens. Those of a shared prefix are the same."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row, T."""
        return sum(group.tokens for group in self.groups)

    def input_tensors(self) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `position_ids`, (1, T) int64 each. Positions count from 0 in every sequence."""
        ids, positions = np.empty((2, 1, self.num_tokens), dtype=np.int64)
        for sequence, indices in zip(self.sequences, self.indices, strict=True):
            # The tokens of a shared prefix are written once for each of its sequences, with the same values.
            ids[0, indices], positions[0, indices] = sequence, np.arange(len(sequence))
        return _to_tensors(input_ids=ids, position_ids=positions)

    def target_tensors(self, loss_masks: Sequences) -> dict[str, torch.Tensor]:
        """Return the loss mask `learnt`, (R, K), as padded batches have it, and where each target is.

        `target_ids` (N,): the token of each target. `logit_positions` (N,): the index in the packed row of the token
        before it, whose hidden state predicts it; for the first token of a branch that is the last of the prefix.
        `target_indices` (N,): its index in the flattened (R * K,). A target in a shared prefix is one of each sequence.
        """
        assert not any(mask[0] for mask in loss_masks), "the first token is never a target"
        tail = loss_mask_tail(loss_masks)  # (R, K)
        first_column = max(len(mask) for mask in loss_masks) - tail.shape[1]
        columns = [np.flatnonzero(mask) for mask in loss_masks]  # of each sequence: its targets
        rows = list(zip(columns, self.sequences, self.indices, strict=True))
        return {
            "learnt": tail,
            **_to_tensors(
                target_ids=np.concatenate([ids[at] for at, ids, _ in rows]),
                logit_positions=np.concatenate([indices[at - 1] for at, _, indices in rows]),
                target_indices=np.concatenate(
                    [row * tail.shape[1] + at - first_column for row, at in enumerate(columns)]
                ),
            ),
        }

    def score_tensors(self, pad_token_ids: Mapping[str, int | None]) -> dict[str, torch.Tensor]:
        """Return where reward models read scores; `pad_token_ids`: name of a tensor -> pad token of its model.

        (R,) each: the index in the packed row of the last token of each sequence that is not the pad token. There a
        reward model of transformers reads the score of a padded row, so that a last EOS is passed over where the pad
        token is the EOS.
        """
        return _to_tensors(**{name: self._last_positions(pad) for name, pad in pad_token_ids.items()})

    def _last_positions(self, pad_token_id: int | None) -> np.ndarray:
        found = np.empty(len(self.sequences), dtype=np.int64)
        for row, (sequence, indices) in enumerate(zip(self.sequences, self.indices, strict=True)):
            real = np.flatnonzero(sequence != pad_token_id)
            found[row] = indices[real[-1] if len(real) else 0]  # as transformers: the first where all are pad tokens
        return found


def pack_rows(
    sequences: Sequences, groups: Sequence[Sequence[int]] | None = None, image_token_ids: Collection[int] = ()
) -> PackedRows:
    """Pack the sequences into one row, in the order of `groups`, whose members share their common beginning.

    `groups`: indices of sequences, each sequence in one group; None: each sequence is a group of its own.
    `image_token_ids`: a group with such a token behind its common beginning shares nothing, so that a group has each of
    its images once, or each of its sequences has its own.
    """
    arrays = [np.asarray(sequence) for sequence in sequences]
    indices: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(arrays)
    packed, start = [], 0
    for members in groups or [[row] for row in range(len(arrays))]:
        prefix = shared_prefix_length([arrays[row] for row in members]) if len(members) > 1 else 0
        if image_token_ids and any(np.isin(arrays[row][prefix:], [*image_token_ids]).any() for row in members):
            prefix = 0
        group = PackedGroup(prefix, tuple(len(arrays[row]) - prefix for row in members))
        shared, branch = np.arange(start, start + prefix), start + prefix
        for row, length in zip(members, group.branches, strict=True):
            indices[row] = np.concatenate([shared, np.arange(branch, branch + length)])
            branch += length
        packed.append(group)
        start = branch
    return PackedRows(tuple(arrays), tuple(packed), tuple(indices))


def shared_prefix_length(sequences: Sequence[np.ndarray]) -> int:
    """Return how many tokens all sequences begin with, at most so many that each has a token of its own left."""
    most = min(len(sequence) for sequence in sequences) - 1
    table = np.stack([sequence[:most] for sequence in sequences])  # (sequences, most)
    differs = (table != table[0]).any(0)
    return int(differs.argmax()) if differs.any() else most


def _to_tensors(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.from_numpy(array.astype(np.int64, copy=False)) for name, array in arrays.items()}
