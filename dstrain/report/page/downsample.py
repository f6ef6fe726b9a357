"""Reduction of a curve to the points that a chart can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray


def downsample(x: ArrayLike, y: ArrayLike, num_buckets: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points with the lowest and highest y of each bucket, the first and the last; without those of NaN.

    `x` and `y` have shape (N,). The result has at most 2 * num_buckets + 2 points in order of x, and all of them if
    there are no more. A spike of one step stays visible, which a mean or every n-th point would hide.
    """
    steps, values = _sort_finite(x, y)
    if len(steps) <= 2 * num_buckets + 2:
        return steps, values
    chosen = {0, len(steps) - 1}
    for begin, end in pairwise(np.linspace(0, len(steps), num_buckets + 1).astype(int)):
        chosen |= {int(begin + np.argmin(values[begin:end])), int(begin + np.argmax(values[begin:end]))}
    indices = sorted(chosen)
    return steps[indices], values[indices]


def bucket_means(x: ArrayLike, y: ArrayLike, num_buckets: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean x and y of each bucket; nothing where `downsample` returns all points."""
    steps, values = _sort_finite(x, y)
    if len(steps) <= 2 * num_buckets + 2:
        return steps[:0], values[:0]
    edges = np.linspace(0, len(steps), num_buckets + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(steps, edges[:-1]) / counts, np.add.reduceat(values, edges[:-1]) / counts


def _sort_finite(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    finite = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[finite], values[finite]
    order = np.argsort(steps, kind="stable")  # damaged files may repeat steps
    return steps[order], values[order]


def round_values(values: Sequence[float] | NDArray[np.float64], digits: int = 6) -> list[float | int]:
    """Return the values with this many significant digits, whole numbers as int: a page is mostly numbers."""
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]
