"""Cells of a grid of tests, some of which only `make test-all` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def mark_slow(cells: Iterable[Any], repeated: Collection[Any]) -> list[Any]:
    """Return the cells as parameters; those in `repeated`, whose claim another cell makes too, are marked as slow.

    A comment beside the call names the other cell. Raises ValueError if one in `repeated` is no cell.
    """
    cells = list(cells)
    if unknown := [cell for cell in repeated if cell not in cells]:
        raise ValueError(f"no such cells: {unknown}")
    return [cell if cell not in repeated else SLOW(*cell) if isinstance(cell, tuple) else SLOW(cell) for cell in cells]
