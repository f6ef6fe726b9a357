"""Sequences of different lengths as rows of a batch: padded, or packed into one row; their loss masks."""

# Shapes: B rows (samples), L tokens of the longest row, K tokens from the first target of any row
# to the end of the padded rows, N targets. Packed: R sequences, T tokens of the packed row; K as if they were padded.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dstrain.batch import Batch, PackedGroup

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import SequenceGroup

Sequences = Sequence[Sequence[int] | np.ndarray]


@dataclass(frozen=True)
class PaddedRows:
    """Sequences as rows of equal length, padded on the right; `PackedRows` has the same methods."""

    sequences: Sequences
    pad_token_id: int

    @property
    def groups(self) -> tuple[PackedGroup, ...]:
        """Empty: the rows are not packed."""
        return ()

    def input_tensors(self) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask`, (B, L) int64 each."""
        return {
            "input_ids": pad(self.sequences, self.pad_token_id),
            "attention_mask": attention_mask(self.sequences),
        }

    def target_tensors(self, loss_masks: Sequences) -> dict[str, torch.Tensor]:
        """Return `loss_mask`, (B, K), and `loss_positions`, (N, 2), of loss masks as long as their sequences."""
        loss_mask = loss_mask_tail(loss_masks)
        return {"loss_mask": loss_mask, "loss_positions": loss_positions(loss_mask, padded_length(self.sequences))}

    def score_tensors(self, pad_token_ids: Mapping[str, int | None]) -> dict[str, torch.Tensor]:
        """Return nothing: a reward model finds the end of a padded row by its pad token."""
        return {}


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
        """Return the loss mask `loss_mask`, (R, K), as padded batches have it, and where each target is.

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
            "loss_mask": tail,
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


def share_tokens(batch: Batch, sequence: SequenceGroup) -> Batch:
    """Return a packed batch as one process of a sequence group computes it.

    Each packed row keeps all of its token ids and is filled up to a multiple of the group's size, by a sequence that no
    loss reads. Of the targets this process gets those that its tokens predict: `logit_positions` count from the first
    of them. The weight is divided, and so are the counts of tokens and samples: sums over all ranks stay what they were.
    """
    import torch

    from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS

    tensors, vision = dict(batch.tensors), dict(batch.vision)
    filled_groups = {}
    for prefix, groups in {"": batch.groups, **batch.other_groups}.items():
        tokens = sum(group.tokens for group in groups)
        missing = -tokens % sequence.size
        if missing:
            groups = (*groups, PackedGroup(0, (missing,)))
            ids, kinds = tensors[f"{prefix}input_ids"], vision.get(MM_TOKEN_TYPE_IDS)
            # Not the token of an image: the model counts them.
            is_text = ids[0] == ids[0] if kinds is None or prefix else kinds[0] == 0
            fill = ids[0, is_text.int().argmax()]
            tensors[f"{prefix}input_ids"] = torch.cat([ids, fill.expand(1, missing)], dim=-1)
            positions = tensors[f"{prefix}position_ids"]  # (1, T), or (3, 1, T)
            more = torch.arange(missing).expand(*positions.shape[:-1], missing)
            tensors[f"{prefix}position_ids"] = torch.cat([positions, more], dim=-1)
            if kinds is not None and not prefix:
                vision[MM_TOKEN_TYPE_IDS] = torch.nn.functional.pad(kinds, (0, missing))
        filled_groups[prefix] = groups
        if f"{prefix}logit_positions" in tensors:
            start, end = sequence.part(tokens + missing)
            positions = tensors[f"{prefix}logit_positions"]
            own = (positions >= start) & (positions < end)
            tensors[f"{prefix}logit_positions"] = positions[own] - start
            for name in ("target_ids", "target_indices"):
                tensors[f"{prefix}{name}"] = tensors[f"{prefix}{name}"][own]
    start, end = (batch.tokens * rank // sequence.size for rank in (sequence.rank, sequence.rank + 1))
    return replace(
        batch,
        tensors=tensors,
        vision=vision,
        groups=filled_groups.pop(""),
        other_groups=filled_groups,
        weight=batch.weight / sequence.size,
        samples=batch.samples if sequence.rank == 0 else (),
        tokens=end - start,
        sequence=sequence,
    )


def shared_prefix_length(sequences: Sequence[np.ndarray]) -> int:
    """Return how many tokens all sequences begin with, at most so many that each has a token of its own left."""
    most = min(len(sequence) for sequence in sequences) - 1
    table = np.stack([sequence[:most] for sequence in sequences])  # (sequences, most)
    differs = (table != table[0]).any(0)
    return int(differs.argmax()) if differs.any() else most


def _to_tensors(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.from_numpy(array.astype(np.int64, copy=False)) for name, array in arrays.items()}


def pad(sequences: Sequences, value: int) -> torch.Tensor:
    """Return the sequences as (B, L) int64, padded on the right with the value."""
    import torch

    table = np.full((len(sequences), padded_length(sequences)), value, dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence)] = sequence
    return torch.from_numpy(table)  # (B, L)


def attention_mask(sequences: Sequences) -> torch.Tensor:
    """Return (B, L) int64, 1 for the tokens of `pad` and 0 for its padding."""
    import torch

    lengths = np.array([len(sequence) for sequence in sequences])
    table = np.arange(padded_length(sequences)) < lengths[:, None]
    return torch.from_numpy(table.astype(np.int64))  # (B, L)


def loss_mask_tail(loss_masks: Sequences) -> torch.Tensor:
    """Return the last K columns of padded loss masks of 0 and 1, (B, K) int64.

    K is the smallest that includes every 1: no logits are needed for the columns before.
    """
    table = pad(loss_masks, 0)  # (B, L)
    columns = table.any(0).nonzero()  # (columns with a target, 1), ascending
    # One column remains without any target: K is never 0.
    return table[:, int(columns[0]) if len(columns) else -1 :].contiguous()


def answer_masks(answers: Sequence[tuple[Sequence[int] | np.ndarray, int]]) -> list[np.ndarray]:
    """Return the loss mask of each sequence given with the index where its answer starts: 1 from there to its end.

    The first token of a sequence is not a target, because there is nothing to predict it from.
    """
    return [(np.arange(len(ids)) >= max(begin, 1)).astype(np.int64) for ids, begin in answers]


def loss_positions(loss_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return row and column of each target in padded sequences (B, length), (N, 2) int64.

    `loss_mask`: (B, K), as `loss_mask_tail` returns it. Call it on the host: on a GPU, `nonzero`
    waits for all earlier work to learn the number of targets.
    """
    import torch

    return loss_mask.nonzero() + torch.tensor([0, length - loss_mask.shape[1]], device=loss_mask.device)


def place_targets(values: Sequence[np.ndarray], loss_mask: torch.Tensor) -> torch.Tensor:
    """Return values of targets at their places, (B, K, …), 0 elsewhere; `values`: of each row, (its targets, …)."""
    import torch

    found = torch.from_numpy(np.concatenate(values))
    whole = found.new_zeros(*loss_mask.shape, *found.shape[1:])
    whole[loss_mask != 0] = found
    return whole


def padded_length(sequences: Sequences) -> int:
    """Return the length of the longest sequence, L."""
    return max(len(sequence) for sequence in sequences)
