"""Positions along time, height and width of the tokens of a packed row (M-RoPE of Qwen2-VL)."""

# Shapes: T tokens of the packed row, N images.

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dstrain.batch import PackedGroup

Grid = tuple[int, int, int]
"""Tokens of an image along time, height and width."""


def packed_rope_positions(is_image: np.ndarray, groups: Sequence[PackedGroup], grids: Sequence[Grid]) -> np.ndarray:
    """Return the positions of a packed row's tokens, (3, T) int64; a branch goes on where its prefix ends.

    `is_image`: (T,) bool. `grids`: of the row's images, N in the order of their tokens. Wang et al. (arXiv 2409.12191),
    section 2.1: an image counts from the next position along each axis, and text goes on after its longest side. Raises
    ValueError where the images' tokens are not those of the grids.
    """
    parts: list[np.ndarray] = []
    left, at = iter(grids), 0
    for group in groups:
        prefix, begin = _sequence_positions(is_image[at : at + group.prefix], left, 0)
        parts.append(prefix)
        at += group.prefix
        for branch in group.branches:
            parts.append(_sequence_positions(is_image[at : at + branch], left, begin)[0])
            at += branch
    if next(left, None) is not None:
        raise ValueError(f"the row has fewer images than the {len(grids)} that were read")
    return np.concatenate(parts, axis=1)


def _sequence_positions(is_image: np.ndarray, grids: Iterator[Grid], begin: int) -> tuple[np.ndarray, int]:
    """Return the positions (3, L) of L consecutive tokens that begin at a position, and the position after them."""
    found, at = np.empty((3, len(is_image)), dtype=np.int64), 0
    while at < len(is_image):
        rest = is_image[at:]
        if not rest[0]:
            length = int(rest.argmax()) or len(rest)
            found[:, at : at + length] = begin + np.arange(length)
            begin += length
        else:
            if (grid := next(grids, None)) is None:
                raise ValueError("the row has more images than were read")
            length = int(np.prod(grid))
            if length > len(rest) or not rest[:length].all():
                raise ValueError(f"an image of {length} tokens has fewer in the row")
            found[:, at : at + length] = begin + np.indices(grid).reshape(3, -1)
            begin += max(grid[1:])
        at += length
    return found, begin
