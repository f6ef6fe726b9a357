"""Curves with the points that a chart can show."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dstrain.report.page.charts import bucket_means, downsample, round_values


def test_a_short_curve_stays_as_it_is() -> None:
    x, y = downsample([1, 2, 3], [5, math.nan, 7], 10)
    assert (list(x), list(y)) == ([1, 3], [5, 7])
    assert len(bucket_means([1, 2, 3], [5, 6, 7], 10)[0]) == 0


def test_a_spike_of_one_step_stays_visible() -> None:
    values = np.ones(100_000)
    values[77_777] = 50
    values[12_345] = -50
    x, y = downsample(np.arange(100_000), values, 100)
    assert len(x) <= 202
    assert y.max() == 50
    assert x[y.argmax()] == 77_777
    assert x[y.argmin()] == 12_345
    assert (x[0], x[-1]) == (0, 99_999)


def test_means_are_of_each_bucket() -> None:
    x, y = bucket_means(np.arange(1000), np.arange(1000) * 2.0, 10)
    assert list(x) == [49.5 + 100 * k for k in range(10)]
    assert list(y) == [99 + 200 * k for k in range(10)]


@given(st.lists(st.floats(width=32), max_size=300), st.integers(1, 20))
def test_the_result_is_a_part_of_the_curve_in_order_with_its_extremes(values: list[float], buckets: int) -> None:
    x, y = downsample(range(len(values)), values, buckets)
    finite = [value for value in values if math.isfinite(value)]
    assert len(x) <= 2 * buckets + 2
    assert all(values[int(step)] == value for step, value in zip(x, y, strict=True))
    assert list(x) == sorted(x)
    if finite:
        assert (y.min(), y.max()) == (min(finite), max(finite))


def test_repeated_and_unsorted_steps_are_sorted() -> None:
    assert list(downsample([3, 1, 2, 1], [1, 2, 3, 4], 10)[0]) == [1, 1, 2, 3]


def test_numbers_are_short() -> None:
    assert round_values([1.0, 0.123456789, 1e-12, 2e20]) == [1, 0.123457, 1e-12, 2e20]
