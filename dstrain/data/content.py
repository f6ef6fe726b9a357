"""Lengths of what records hold, such as series or chains, in words: a task notes them with `Record.note_content`."""

from __future__ import annotations

import math
from collections import Counter


def describe_range(counts: Counter[int], unit: str) -> str:
    """Return a length with its unit, or the least, the median and the largest one: `12, 16, 20 values (min, median, max)`.

    `counts`: length -> how often.
    """
    if len(counts) == 1:
        return f"{next(iter(counts))} {unit}"
    return f"{min(counts)}, {find_median(counts)}, {max(counts)} {unit} (min, median, max)"


def find_median(counts: Counter[int]) -> int:
    """Return the median of lengths that are counted, the lower one of two."""
    left = math.ceil(counts.total() / 2)
    for length in sorted(counts):
        left -= counts[length]
        if left <= 0:
            return length
    raise ValueError("nothing was counted")
