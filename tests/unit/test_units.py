"""Bytes, counts and durations as people read them."""

from __future__ import annotations

import pytest

from dstrain.units import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("size", "text"),
    [(5, "5 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_have_a_binary_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12"), (1234567, "1.23 M"), (7e9, "7 G"), (2e12, "2 T"), (1500, "1.5 k")]
)
def test_counts_have_three_digits(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.26, "1.3 s"), (65, "1 m 05 s"), (3725, "1 h 02 m 05 s")])
def test_durations_are_split_up(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
