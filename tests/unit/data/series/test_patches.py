"""Patches: every observed value is in one of them, padding never looks observed, and masks hide what can be checked."""

from __future__ import annotations

import numpy as np
import pytest

from dstrain.data.series import (
    SERIES_TOKEN_ID,
    PatchConfig,
    choose_masked,
    cut_patches,
    from_columns,
    insert_soft_tokens,
    stack_patches,
    to_columns,
)


def series(channels: int, steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    values = rng.randn(channels, steps).astype(np.float32)
    values[rng.rand(channels, steps) < 0.2] = np.nan
    return values, rng.randn(channels, 2).astype(np.float32)


@pytest.mark.parametrize(("channels", "steps"), [(1, 1), (1, 12), (3, 13), (2, 4)])
@pytest.mark.parametrize("per_token", [1, 3])
def test_patches_hold_every_value_once(channels: int, steps: int, per_token: int) -> None:
    values, stats = series(channels, steps)
    config = PatchConfig(4, per_token)
    found = cut_patches(values, stats, config)
    assert len(found.values) == found.num_tokens * per_token == config.count_tokens(channels, steps) * per_token
    assert found.values[:, :4][found.observed] == pytest.approx(values[~np.isnan(values)])
    assert not found.values[:, :4][~found.observed].any()
    for number, channel in enumerate(range(channels)):
        own = found.positions[:, 1] == channel
        assert found.positions[own, 0].tolist() == list(range(own.sum()))
        assert (found.stats[own] == stats[number]).all()


def test_columns_of_a_store_give_the_series_back_bit_for_bit() -> None:
    values, stats = series(2, 9)
    columns = to_columns(values, stats)
    assert all(column.dtype == np.float32 for column in columns.values())
    again = from_columns(columns)
    assert np.array_equal(again[0], values, equal_nan=True)
    assert np.array_equal(again[1], stats)


def test_rows_of_a_batch_are_padded_with_patches_that_are_not_real() -> None:
    config = PatchConfig(4)
    short, long = cut_patches(*series(1, 5), config), cut_patches(*series(2, 9), config)
    found = stack_patches([short, long])
    assert found["series"].shape == (2, 6, 10)
    assert found["series_positions"].shape == (2, 6, 3)
    assert found["series_positions"][:, :, 2].sum(1).tolist() == [2, 6]
    assert not found["series"][0, 2:].any()


@pytest.mark.parametrize("ratio", [0.01, 0.5, 0.99])
def test_hidden_patches_have_observed_values(ratio: float) -> None:
    values, stats = series(1, 40)
    values[0, 8:20] = np.nan
    patches = cut_patches(values, stats, PatchConfig(4))
    hidden = choose_masked(patches, ratio, np.random.RandomState(3))
    assert 1 <= hidden.sum() <= 7
    assert patches.observed[hidden].any(1).all()
    assert (hidden == choose_masked(patches, ratio, np.random.RandomState(3))).all()


def test_soft_tokens_follow_the_bos() -> None:
    class Tokenizer:
        bos_token_id = 1

    assert insert_soft_tokens(Tokenizer(), [1, 5, 6], 2) == [1, SERIES_TOKEN_ID, SERIES_TOKEN_ID, 5, 6]
    assert insert_soft_tokens(Tokenizer(), [5, 6], 1) == [SERIES_TOKEN_ID, 5, 6]
    assert insert_soft_tokens(Tokenizer(), [], 1) == [SERIES_TOKEN_ID]
