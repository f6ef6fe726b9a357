"""Hidden residues: fixed by seed and sample, and never more than a chain can spare."""

from __future__ import annotations

import numpy as np
import pytest

from dstrain.data.structures import UNKNOWN, Chain
from dstrain.tasks.protein import MaskMode, ResidueMask


def chain(length: int) -> Chain:
    random = np.random.RandomState(length)
    types = random.randint(20, size=length).astype(np.int32)
    return Chain("A", types, random.normal(size=(length, 4, 3)), np.arange(length))


def masking(mode: MaskMode = "separate", ratio: float = 0.15, max_length: int = 64) -> ResidueMask:
    return ResidueMask(ratio, mode, max_length, 3)


@pytest.mark.parametrize("mode", ["separate", "together"])
def test_the_ratio_of_types_and_backbones_is_hidden(mode: MaskMode) -> None:
    found = masking(mode).apply(chain(60), (5, 0, 0))
    assert found.hides_type.sum() == found.hides_coordinates.sum() == 9
    assert (found.hides_type == found.hides_coordinates).all() == (mode == "together")


def test_the_key_alone_decides() -> None:
    first, again, other = (masking().apply(chain(60), key) for key in ((5, 0, 0), (5, 0, 0), (5, 0, 1)))
    assert (first.hides_type == again.hides_type).all()
    assert (first.hides_type != other.hides_type).any()


@pytest.mark.parametrize("mode", ["separate", "together"])
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.99])
@pytest.mark.parametrize("length", [2, 3, 30, 200])
def test_something_is_hidden_and_a_backbone_is_shown(mode: MaskMode, ratio: float, length: int) -> None:
    found = masking(mode, ratio).apply(chain(length), (1, 0, 7))
    assert 1 <= found.hides_coordinates.sum() <= found.hides_type.sum()
    assert (found.chain.is_complete & ~found.hides_coordinates).any()


def test_what_is_unknown_is_no_target() -> None:
    whole = chain(60)
    whole.types[::2] = UNKNOWN
    whole.coordinates[::3, 1] = np.nan
    found = masking(ratio=0.9).apply(whole, (1, 0, 0))
    assert found.chain.is_known[found.hides_type].all()
    assert found.chain.is_complete[found.hides_coordinates].all()


def test_a_long_chain_is_cut_to_a_window_that_differs_from_time_to_time() -> None:
    whole = chain(300)
    windows = [masking().apply(whole, (1, 0, place)).chain for place in range(8)]
    assert all(len(window.types) == 64 for window in windows)
    assert len({int(window.positions[0]) for window in windows}) > 4
    for window in windows:
        start = int(window.positions[0])
        assert (window.types == whole.types[start : start + 64]).all()


def test_a_window_holds_residues_that_can_be_hidden_and_shown() -> None:
    whole = chain(300)
    whole.coordinates[: 200 - 10] = np.nan
    whole.coordinates[200:] = np.nan
    for place in range(20):
        found = masking(max_length=16).apply(whole, (1, 0, place))
        assert (found.chain.is_complete & ~found.hides_coordinates).any()
        assert found.hides_coordinates.any()
