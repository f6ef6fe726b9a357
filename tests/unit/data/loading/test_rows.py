"""Padded rows are filled up on the right; packed rows hold every token once, and each sequence finds its own tokens, positions and targets in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.batch import Batch, PackedGroup
from dstrain.data.loading.rows import PaddedRows, attention_mask, pack_rows, pad, share_tokens, shared_prefix_length
from dstrain.distributed.world import SequenceGroup

CHOSEN, REJECTED = [1, 2, 3, 4, 5], [1, 2, 3, 9]
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=2, max_size=8)


def test_padding_fills_up_on_the_right() -> None:
    rows = [np.array([1, 2, 3], dtype=np.int32), [4]]
    assert pad(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    assert attention_mask(rows).tolist() == [[1, 1, 1], [1, 0, 0]]


def test_ids_and_masks_are_int64_and_can_be_written() -> None:
    frozen = np.array([1, 2], dtype=np.int32)
    frozen.flags.writeable = False
    table = pad([frozen], 0)
    table[0, 0] = 5
    assert str(table.dtype) == str(attention_mask([frozen]).dtype) == "torch.int64"


def test_a_pair_shares_its_beginning() -> None:
    rows = pack_rows([CHOSEN, REJECTED], [[0, 1]])
    tensors = rows.input_tensors()
    assert rows.groups == (PackedGroup(3, (2, 1)),)
    assert tensors["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3]]
    assert [indices.tolist() for indices in rows.indices] == [[0, 1, 2, 3, 4], [0, 1, 2, 5]]


def test_images_behind_the_beginning_are_not_shared() -> None:
    """A group has each image once, or each of its sequences has its own."""
    assert pack_rows([CHOSEN, REJECTED], [[0, 1]], {3}).groups == (PackedGroup(3, (2, 1)),)
    for image_token in (4, 9):
        assert pack_rows([CHOSEN, REJECTED], [[0, 1]], {image_token}).groups == (PackedGroup(0, (5, 4)),)
    assert pack_rows([CHOSEN, [1, 4, 4]], [[0, 1]], {4}).groups == (PackedGroup(0, (5, 3)),)


def test_groups_follow_one_another_and_sequences_keep_their_order() -> None:
    rows = pack_rows([CHOSEN, [7, 8], REJECTED, [7, 6, 5]], [[0, 2], [1, 3]])
    assert rows.groups == (PackedGroup(3, (2, 1)), PackedGroup(1, (1, 2)))
    assert rows.input_tensors()["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 7, 8, 6, 5]]
    assert rows.indices[3].tolist() == [6, 8, 9]


def test_sequences_of_no_group_share_nothing() -> None:
    rows = pack_rows([CHOSEN, REJECTED])
    assert rows.groups == (PackedGroup(0, (5,)), PackedGroup(0, (4,)))
    assert rows.input_tensors()["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("other", "prefix"), [([1, 2, 3, 4, 5], 4), ([1, 2], 1), ([1, 2, 3, 4, 5, 6], 4), ([4, 2], 0), ([1], 0)]
)
def test_every_branch_keeps_a_token(other: list[int], prefix: int) -> None:
    assert shared_prefix_length([np.array(CHOSEN), np.array(other)]) == prefix


def test_the_first_token_of_a_branch_is_predicted_from_the_end_of_the_prefix() -> None:
    rows = pack_rows([CHOSEN, REJECTED], [[0, 1]])
    targets = rows.target_tensors([[0, 0, 0, 1, 1], [0, 0, 0, 1]])
    assert targets["target_ids"].tolist() == [4, 5, 9]
    assert targets["logit_positions"].tolist() == [2, 3, 2]
    assert targets["loss_mask"].tolist() == [[1, 1], [1, 0]]
    assert targets["target_indices"].tolist() == [0, 1, 2]


def test_a_target_in_a_shared_beginning_counts_for_both() -> None:
    targets = pack_rows([CHOSEN, REJECTED], [[0, 1]]).target_tensors([[0, 1, 1, 1, 1], [0, 1, 1, 1]])
    assert targets["target_ids"].tolist() == [2, 3, 4, 5, 2, 3, 9]
    assert targets["logit_positions"].tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_without_a_target_there_is_one_column() -> None:
    targets = pack_rows([[1, 2], [3]]).target_tensors([[0, 0], [0]])
    assert targets["loss_mask"].tolist() == [[0], [0]]
    assert all(targets[name].tolist() == [] for name in ("target_ids", "logit_positions", "target_indices"))


@given(SEQUENCES, st.data())
def test_each_sequence_is_found_again_with_the_targets_of_padded_rows(sequences: list[Any], data: Any) -> None:
    half = len(sequences) // 2
    pairs = [[row, half + row] for row in range(half)] + [[row] for row in range(2 * half, len(sequences))]
    rows = pack_rows(sequences, data.draw(st.sampled_from([None, pairs])))
    inputs = {name: value[0].numpy() for name, value in rows.input_tensors().items()}
    for sequence, indices in zip(sequences, rows.indices, strict=True):
        assert inputs["input_ids"][indices].tolist() == sequence
        assert inputs["position_ids"][indices].tolist() == [*range(len(sequence))]
    used = np.concatenate(rows.indices)
    assert {*used.tolist()} == {*range(rows.num_tokens)}, "no token is in the row that no sequence has"
    masks = [[0, *data.draw(st.lists(st.integers(0, 1), min_size=len(one) - 1, max_size=len(one) - 1))] for one in sequences]  # fmt: skip
    padded, packed = PaddedRows(sequences, 0).target_tensors(masks), rows.target_tensors(masks)
    assert packed["loss_mask"].equal(padded["loss_mask"])
    assert packed["target_indices"].equal(padded["loss_mask"].flatten().nonzero()[:, 0])
    ids = PaddedRows(sequences, 0).input_tensors()["input_ids"]
    row, column = padded["loss_positions"].unbind(1)
    assert packed["target_ids"].equal(ids[row, column])
    before = [int(rows.indices[int(r)][int(c) - 1]) for r, c in zip(row, column, strict=True)]
    assert packed["logit_positions"].tolist() == before


def test_scores_are_read_at_the_last_token_that_is_not_the_pad_token() -> None:
    rows = pack_rows([[1, 2, 7, 9], [1, 2, 9, 9], [9, 9]], [[0, 1], [2]])
    found = rows.score_tensors({"own": 0, "pads with 9": 9})
    assert found["own"].tolist() == [3, 5, 7]
    assert found["pads with 9"].tolist() == [2, 1, 6]
    assert PaddedRows([[1]], 0).score_tensors({"own": 0}) == {}


def test_the_first_token_is_never_a_target() -> None:
    """Nothing comes before it, and the index before it would be that of the row's last token."""
    with pytest.raises(AssertionError, match=r"the first token is never a target"):
        pack_rows([[1, 2, 3], [4, 5]]).target_tensors([[0, 1, 1], [1, 1]])


@given(SEQUENCES, st.integers(1, 9))
def test_processes_share_the_targets_of_a_row(sequences: list[list[int]], size: int) -> None:
    """Each target is of one process, also where a row has fewer tokens than there are processes."""
    rows = pack_rows(sequences)
    tensors = {**rows.input_tensors(), **rows.target_tensors([[0] + [1] * (len(one) - 1) for one in sequences])}
    whole = Batch(tensors=tensors, groups=rows.groups, weight=7.0, samples=(3, 4), tokens=rows.num_tokens)
    shared = [share_tokens(whole, SequenceGroup(rank, size)) for rank in range(size)]
    length = shared[0].tensors["input_ids"].shape[1]
    assert length % size == 0
    assert rows.num_tokens <= length < rows.num_tokens + size
    assert length == shared[0].tensors["position_ids"].shape[1] == sum(group.tokens for group in shared[0].groups)
    found = []
    for rank, batch in enumerate(shared):
        start, end = rank * length // size, (rank + 1) * length // size
        before = batch.tensors["logit_positions"] + start
        assert all(start <= place < end for place in before.tolist())
        found += zip(
            before.tolist(), batch.tensors["target_ids"].tolist(), batch.tensors["target_indices"].tolist(), strict=True
        )
    names = ("logit_positions", "target_ids", "target_indices")
    assert sorted(found) == sorted(zip(*(tensors[name].tolist() for name in names), strict=True))
    assert sum(batch.weight for batch in shared) == pytest.approx(7.0)
    assert sum(batch.tokens for batch in shared) == rows.num_tokens
    assert [batch.samples for batch in shared] == [(3, 4), *[()] * (size - 1)]
