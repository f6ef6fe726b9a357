"""Many bad records for a reader: by the kind of their fault, the first of each kind."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstrain.data.sources.base import BadRow

EACH = 10
"""Records that are shown of each kind of fault."""
KINDS = 10
"""Kinds that a refusal shows."""
_VARIES = re.compile(r"\S*[\d/\\.]\S*")
"""Words that differ from record to record: numbers, places in a record, paths."""


def by_kind(rows: Sequence[BadRow]) -> dict[str, list[BadRow]]:
    """The rows by what is wrong with them, whatever the numbers and paths in it are; in their order."""
    kinds: dict[str, list[BadRow]] = {}
    for row in rows:
        kinds.setdefault(_VARIES.sub("*", row.reason), []).append(row)
    return kinds


def show_rows(rows: Sequence[BadRow], each: int | None = EACH, most_kinds: int | None = KINDS) -> list[str]:
    """A line for each row; of a kind with more than `each`, the first and how many more there are, of so many kinds.

    None: all.
    """
    kinds = [*by_kind(rows).values()]
    if len(kinds[:most_kinds]) == len(kinds) and (each is None or all(len(of_kind) <= each for of_kind in kinds)):
        return [f"{row.where}: {row.reason}" for row in rows]
    lines = []
    for of_kind in kinds[:most_kinds]:
        shown = of_kind[:each]
        lines += [f"{row.where}: {row.reason}" for row in shown]
        if more := len(of_kind) - len(shown):
            lines.append(f"… and {more} more like {shown[-1].where}")
    if others := kinds[len(kinds[:most_kinds]) :]:
        count = len(others)
        lines.append(f"… and {sum(map(len, others))} more of {count} other kind{'s' * (count != 1)}")
    return lines
