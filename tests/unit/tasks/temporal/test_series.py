"""Records of series: normalized per channel, with mean and scale kept, and every fault named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dstrain.data.encoding.conversations import SOFT_TOKEN_ID, insert_soft_tokens
from dstrain.data.records import ColumnReport, add_record
from dstrain.errors import BadRecord
from dstrain.tasks.temporal.series import (
    CURVES,
    PatchConfig,
    SyntheticCurves,
    SyntheticOptions,
    choose_masked,
    cut_patches,
    from_columns,
    normalize,
    read_series_record,
    stack_patches,
    to_columns,
)
from dstrain.tasks.temporal.task import PATTERN_WORDS, find_patterns, names_right_pattern


def test_a_list_of_numbers_is_one_channel() -> None:
    found = read_series_record({"series": [1, 2, 3], "caption": " rises "})
    assert found.values.shape == (1, 3)
    assert found.captions == ("rises",)
    assert found.values.mean() == pytest.approx(0, abs=1e-6)
    assert found.values.std() == pytest.approx(1)
    assert np.sinh(found.stats[0]) == pytest.approx([2, np.sqrt(2 / 3)])


@pytest.mark.parametrize(
    ("label", "text"), [(" up ", "up"), (3, "3"), (1.5, "1.5"), (None, None), (float("nan"), None)]
)
def test_a_label_is_a_text_or_a_number(label: Any, text: str | None) -> None:
    assert read_series_record({"series": [1, 2], "label": label}).label == text


@pytest.mark.parametrize("label", ["", "  ", ["up"], {"a": 1}])
def test_another_label_is_refused(label: Any) -> None:
    with pytest.raises(BadRecord, match=r"'label' is .*, not a text or a number; write one, or null"):
        read_series_record({"series": [1, 2], "label": label})


def test_mean_and_scale_are_those_of_observed_values() -> None:
    values, stats = normalize(np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan]]))
    assert values[0, ::2] == pytest.approx([-1, 1])
    assert np.isnan(values[0, 1])
    assert np.sinh(stats) == pytest.approx(np.array([[2, 1], [0, 0]])), "one channel may be missing as a whole"


@pytest.mark.parametrize("level", [0.0, 1e-30, 0.1, 1e9, -5e20])
def test_a_constant_channel_is_zero_and_keeps_its_level(level: float) -> None:
    values, stats = normalize(np.full((1, 7), level))
    assert not values.any()
    assert stats[0, 1] == 0
    assert stats[0, 0] == pytest.approx(np.arcsinh(level))


def test_small_changes_on_a_large_level_are_kept() -> None:
    values, _ = normalize(1e6 + np.array([[0.0, 1.0, 2.0]]))
    assert values[0] == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "has no 'series'"),
        ({"series": "1,2"}, "'series' is not a list"),
        ({"series": []}, "'series' is empty"),
        ({"series": [[], []]}, "'series' is empty"),
        ({"series": [[1, 2], [1]]}, r"the channels of 'series' have 2, 1 values; make them equal"),
        ({"series": [1, "2"]}, "value 2 of channel 1 of 'series' is '2', not a number"),
        ({"series": [1, True]}, "value 2 of channel 1 of 'series' is True"),
        ({"series": [[1], 2]}, "value 1 of channel 1 of 'series' is"),
        ({"series": [None, None]}, "'series' has no value, all are missing; remove the record"),
        ({"series": [1, float("nan") * 0, float("inf")]}, "infinite value"),
        ({"series": [1, 10**400]}, "does not fit into 64 bits"),
        ({"series": [1e200]}, "above 1e100"),
        ({"series": [1], "captions": []}, "a caption is empty"),
        ({"series": [1], "captions": ["a", " "]}, "a caption is empty"),
        ({"series": [1], "captions": 5}, "'captions' is not a text or a list of texts"),
        ({"series": [1], "prompt": 5}, "'prompt' is not a text"),
    ],
)
def test_a_bad_record_says_what_is_wrong(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        read_series_record(record)


# Patches: every observed value is in one of them, padding never looks observed, and masks hide what can be checked.


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

    assert insert_soft_tokens(Tokenizer(), [1, 5, 6], 2) == [1, SOFT_TOKEN_ID, SOFT_TOKEN_ID, 5, 6]
    assert insert_soft_tokens(Tokenizer(), [5, 6], 1) == [SOFT_TOKEN_ID, 5, 6]
    assert insert_soft_tokens(Tokenizer(), [], 1) == [SOFT_TOKEN_ID]


# Synthetic curves: functions of seed and index, with captions that name what is in them.


OPTIONS = SyntheticOptions(num_samples=600, seed=3)


def test_a_curve_depends_on_seed_and_index_alone() -> None:
    curves, again = SyntheticCurves(OPTIONS), SyntheticCurves(replace(OPTIONS, num_samples=10))
    for index in (9, 2, 5):
        assert curves[index]["caption"] == again[index]["caption"]
        assert np.array_equal(curves[index]["series"], again[index]["series"])
    other = SyntheticCurves(replace(OPTIONS, seed=4))
    assert not np.array_equal(curves[5]["series"][:8], other[5]["series"][:8])
    assert len({curve.digest for curve in (curves, again, other)}) == 3


def test_every_pattern_occurs_about_equally_often() -> None:
    names = [SyntheticCurves(OPTIONS)[index]["pattern"] for index in range(600)]
    counts = [names.count(one.__name__) for one in CURVES]
    assert sum(counts) == 600
    assert min(counts) > 60


def test_captions_name_what_the_curve_does() -> None:
    wanted = {"peak": {"peak"}, "dip": {"dip"}, "periodic": {"periodic"}, "anomaly": {"anomaly", "plateau"}}
    for index in range(200):
        curve = SyntheticCurves(replace(OPTIONS, noise=0.0))[index]
        values, found = read_series_record(curve).values[0], find_patterns(curve["caption"])
        if curve["pattern"] in wanted:
            assert found == wanted[curve["pattern"]], curve["caption"]
        if curve["pattern"] in ("peak", "dip"):
            share = int((values.argmax() if curve["pattern"] == "peak" else values.argmin()) / (len(values) - 1) * 3)
            assert ("beginning", "middle", "end")[min(share, 2)] in curve["caption"] or share * 3 % 1 < 0.1
        if curve["pattern"] == "trend":
            assert found == ({"up"} if values[-1] > values[0] else {"down"})


def test_missing_values_leave_one_at_least() -> None:
    curves = SyntheticCurves(replace(OPTIONS, missing=0.99))
    counts = [int((~np.isnan(curves[index]["series"])).sum()) for index in range(100)]
    assert min(counts) == 1


@pytest.mark.parametrize(
    "values",
    [{"num_samples": 0}, {"min_length": 4}, {"max_length": 8}, {"noise": -1.0}, {"missing": 1.0}, {"seed": -1}],
)
def test_options_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SyntheticOptions(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("caption", "patterns"),
    [
        ("Rises sharply, then stays flat", {"up", "plateau"}),
        ("lowest value is near the end", {"dip"}),
        ("spikes twice and DECREASES", {"peak", "down"}),
        ("upper", set()),
        ("a steady increase", {"up"}),
        ("remains fairly steady", {"plateau"}),
        ("Steady until the last third.", {"plateau"}),
        ("steady and even slope upwards", {"up"}),
        ("A slow continuous descent.", {"down"}),
        ("Descreases sharply, then plunges", {"down"}),
        ("incresae, then a small raise", {"up"}),
        ("ends slightly higher than initially", {"up"}),
        ("ends lower than it started", {"down"}),
        ("Apexes at the end", {"peak"}),
        ("low point in middle", {"dip"}),
        ("ends at about the same value", {"plateau"}),
    ],
)
def test_patterns_are_found_by_whole_words(caption: str, patterns: set[str]) -> None:
    assert find_patterns(caption) == patterns
    assert patterns <= {*PATTERN_WORDS}


def test_a_caption_is_right_if_references_name_all_that_it_names() -> None:
    references = ["rises at first", "peaks in the middle"]
    assert names_right_pattern("a peak", references) == 1
    assert names_right_pattern("increases to its maximum", references) == 1
    assert names_right_pattern("a peak, then falls", references) == 0
    assert names_right_pattern("a curve", references) == 0
    assert names_right_pattern("a curve", ["no order"]) == 1
    assert names_right_pattern("rises", ["no order"]) == 0


def test_a_synthetic_curve_is_named_as_a_record_of_its_source() -> None:
    reports: dict[str, ColumnReport] = {}
    add_record(reports, SyntheticCurves(OPTIONS).location(2), {"series": []})
    assert [*reports] == ["synthetic curves"]
