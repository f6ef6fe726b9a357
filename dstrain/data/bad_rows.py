"""Many bad records for a reader: by the kind of their fault, the first of each kind."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstrain.data.rows import BadRow

EACH = 10
"""Records that are shown of each kind of fault."""
KINDS = 10
"""Kinds that are shown, where records are left out at all."""
_VARIES = re.compile(r"\S*[\d/\\.]\S*")
"""Words that differ from record to record: numbers, places in a record, paths."""


def by_kind(rows: Sequence[BadRow]) -> dict[str, list[BadRow]]:
    """The rows by what is wrong with them, whatever the numbers and paths in it are; in their order."""
    kinds: dict[str, list[BadRow]] = {}
    for row in rows:
        kinds.setdefault(_VARIES.sub("*", row.reason), []).append(row)
    return kinds


def show_rows(rows: Sequence[BadRow], each: int | None = EACH) -> list[str]:
    """A line for each row; of a kind with more than `each`, the first and how many more there are. None: all."""
    kinds = by_kind(rows)
    if each is None or all(len(of_kind) <= each for of_kind in kinds.values()):
        return [f"{row.where}: {row.reason}" for row in rows]
    lines = []
    for of_kind in [*kinds.values()][:KINDS]:
        lines += [f"{row.where}: {row.reason}" for row in of_kind[:each]]
        if more := len(of_kind) - each if len(of_kind) > each else 0:
            lines.append(f"… and {more} more like {of_kind[each - 1].where}")
    if others := sum(len(of_kind) for of_kind in [*kinds.values()][KINDS:]):
        lines.append(f"… and {others} of {len(kinds) - KINDS} other kinds")
    return lines
