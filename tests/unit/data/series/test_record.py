"""Records of series: normalized per channel, with mean and scale kept, and every fault named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dstrain.data.records import BadRecord
from dstrain.data.series import normalize, read_series_record


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
