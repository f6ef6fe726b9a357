"""Synthetic curves: functions of seed and index, with captions that name what is in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dstrain.data.series import CURVES, SyntheticCurves, SyntheticOptions, read_series_record
from dstrain.tasks.temporal import PATTERNS, find_patterns, names_right_pattern

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
    assert patterns <= {*PATTERNS}


def test_a_caption_is_right_if_references_name_all_that_it_names() -> None:
    references = ["rises at first", "peaks in the middle"]
    assert names_right_pattern("a peak", references) == 1
    assert names_right_pattern("increases to its maximum", references) == 1
    assert names_right_pattern("a peak, then falls", references) == 0
    assert names_right_pattern("a curve", references) == 0
    assert names_right_pattern("a curve", ["no order"]) == 1
    assert names_right_pattern("rises", ["no order"]) == 0
