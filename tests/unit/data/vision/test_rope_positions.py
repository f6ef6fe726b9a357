"""Positions of a packed row are those that transformers computes for each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from dstrain.batch import PackedGroup
from dstrain.data.loading.collate import pack_rows
from dstrain.data.vision.processor import packed_rope_positions
from tests.unit.models.test_qwen import config_for, words

IMAGE, GRIDS = 1, [(1, 2, 3), (1, 4, 1), (1, 1, 1), (1, 2, 2)]
"""A token of an image, and the tokens of images along time, height and width."""
Parts = tuple[int, ...]
"""Parts of a sequence: n tokens of text for n, the tokens of image k for -1 - k."""
PAIR: list[Parts] = [(4, -1, 3, -2, 5), (4, -1, 3, -2, 1)]
CASES: dict[str, tuple[list[Parts], list[list[int]], list[int]]] = {
    "a shared beginning": ([*PAIR, (2, -3), (6,)], [[0, 1], [2], [3]], [0, 1, 2]),
    "nothing shared": (PAIR, [[0], [1]], [0, 1, 0, 1]),
    "an image in each branch": ([(3, -4), (3, 2, -1, 1)], [[0, 1]], [3, 0]),
    "a beginning that ends with an image": ([(1, -4, 2), (1, -4, 1)], [[0, 1]], [3]),
}
"""Sequences, their groups, and the images in the order of the packed row."""


def ids_of(parts: Parts) -> np.ndarray:
    pieces = [np.full(np.prod(GRIDS[-1 - part]), IMAGE) if part < 0 else 10 + np.arange(part) for part in parts]
    return np.concatenate(pieces)


def of_transformers(parts: Parts) -> np.ndarray:
    """Return the positions (3, L) of a sequence alone."""
    ids = ids_of(parts)
    model = AutoModelForImageTextToText.from_config(config_for(words())).model
    patches = torch.tensor([GRIDS[-1 - part] for part in parts if part < 0]).view(-1, 3) * torch.tensor([1, 2, 2])
    row, is_image = torch.from_numpy(ids)[None], torch.from_numpy(ids == IMAGE)[None].int()
    return np.asarray(model.get_rope_index(row, is_image, patches)[0][:, 0])


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_each_sequence_alone(case: str) -> None:
    sequences, groups, images = CASES[case]
    rows = pack_rows([ids_of(parts) for parts in sequences], groups, {IMAGE})
    is_image = rows.input_tensors()["input_ids"][0].numpy() == IMAGE
    found = packed_rope_positions(is_image, rows.groups, [GRIDS[image] for image in images])
    for parts, indices in zip(sequences, rows.indices, strict=True):
        assert np.array_equal(found[:, indices], of_transformers(parts))


@pytest.mark.parametrize(
    ("grids", "reason"),
    [([], "more images"), ([(1, 2, 2)], "more images"), ([(1, 2, 4)], "has fewer"), ([(1, 2, 3)] * 2, "fewer images")],
)
def test_images_that_are_not_those_of_the_row_are_an_error(grids: list[tuple[int, int, int]], reason: str) -> None:
    is_image = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0]) > 0
    with pytest.raises(ValueError, match=reason):
        packed_rope_positions(is_image, (PackedGroup(0, (9,)),), grids)


def test_adjacent_images_are_told_apart_by_their_sizes() -> None:
    found = packed_rope_positions(np.ones(6) > 0, (PackedGroup(4, (2,)),), [(1, 2, 2), (1, 1, 2)])
    assert found.tolist() == [[0, 0, 0, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 3]]
