"""Lists of bad records, grouped by reason and limited in length."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dstrain.data.records import BadRow

MAX_ROWS_PER_REASON = 10
"""Records listed for each reason."""
MAX_REASONS = 10
"""Reasons listed in an error message."""
_VARIABLE_WORD = re.compile(r"\('.*?'\)|\S*[\d/\\.]\S*")
"""What differs from record to record: values in brackets, numbers, keys, paths."""


def group_by_reason(rows: Sequence[BadRow]) -> dict[str, list[BadRow]]:
    """Return the rows by reason, ignoring numbers and paths in it; their order stays."""
    kinds: dict[str, list[BadRow]] = {}
    for row in rows:
        kinds.setdefault(_VARIABLE_WORD.sub("*", row.reason), []).append(row)
    return kinds


def format_bad_rows(
    rows: Sequence[BadRow], max_per_reason: int | None = MAX_ROWS_PER_REASON, max_reasons: int | None = MAX_REASONS
) -> list[str]:
    """Return a line for each row, shortened to the first rows of the first reasons.

    A line "… and N more" stands for the rest. None: no limit.
    """
    kinds = [*group_by_reason(rows).values()]
    if len(kinds[:max_reasons]) == len(kinds) and (
        max_per_reason is None or all(len(of_kind) <= max_per_reason for of_kind in kinds)
    ):
        return [f"{row.location}: {row.reason}" for row in rows]
    lines = []
    for of_kind in kinds[:max_reasons]:
        shown = of_kind[:max_per_reason]
        lines += [f"{row.location}: {row.reason}" for row in shown]
        if more := len(of_kind) - len(shown):
            lines.append(f"… and {more} more like {shown[-1].location}")
    if others := kinds[len(kinds[:max_reasons]) :]:
        count = len(others)
        lines.append(f"… and {sum(map(len, others))} more of {count} other kind{'s' * (count != 1)}")
    return lines
