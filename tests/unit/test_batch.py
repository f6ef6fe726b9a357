"""A batch keeps its parts through copies, and sums leave the device together."""

from __future__ import annotations

import pytest
import torch

from dstrain.batch import Batch, PackedGroup, Progress
from dstrain.device_copies import to_floats


def make(**more: object) -> Batch:
    return Batch(tensors={"a": torch.ones(2)}, weight=2.0, samples=(3, 4), tokens=7, **more)  # type: ignore[arg-type]


def test_a_group_has_the_tokens_of_its_prefix_and_branches() -> None:
    assert PackedGroup(5, (2, 3)).tokens == 10
    assert make(groups=(PackedGroup(0, (2,)),)).is_packed
    assert not make().is_packed


def test_a_filler_has_the_tensors_and_no_weight() -> None:
    filler = make().as_filler()
    assert (filler.weight, filler.samples, filler.tokens, filler.is_filler) == (0.0, (), 0, True)
    assert filler.tensors["a"].tolist() == [1, 1]


def test_all_tensors_move_those_of_images_too() -> None:
    batch = make(vision={"pixel_values": torch.zeros(1)}).with_tensors({"b": torch.zeros(1)})
    moved = batch.to(torch.device("meta"))
    assert {tensor.device.type for tensor in (*moved.tensors.values(), *moved.vision.values())} == {"meta"}
    assert set(moved.tensors) == {"a", "b"}


@pytest.mark.parametrize(("mask", "has_padding"), [([[1, 1], [1, 0]], True), ([[1, 1], [1, 1]], False)])
def test_the_host_knows_of_padding_before_the_mask_moves(mask: list[list[int]], has_padding: bool) -> None:
    moved = make().with_tensors({"attention_mask": torch.tensor(mask)}).to(torch.device("meta"))
    assert moved.has_padding is has_padding
    assert moved.to(torch.device("meta")).has_padding is has_padding, "a second copy does not ask the device"
    assert make().to(torch.device("meta")).has_padding is None


def test_every_tensor_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)  # there is no GPU to pin for
    pinned = make(vision={"pixel_values": torch.zeros(1)}).pin_memory()
    assert pinned.tensors["a"].tolist() == [2, 2]
    assert pinned.vision["pixel_values"].tolist() == [1]


def test_tensors_and_numbers_become_floats_in_their_order() -> None:
    assert to_floats([torch.tensor(1.5), 2, torch.tensor(3)]) == [1.5, 2.0, 3.0]
    assert to_floats([4]) == [4.0]


def test_progress_counts_steps_and_samples() -> None:
    assert Progress().advance(8).advance(6) == Progress(step=2, samples=14)
