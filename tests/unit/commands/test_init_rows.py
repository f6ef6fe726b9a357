"""The rows of init_from.yaml name conditions, transformations and recipe keys that exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dstrain.commands.init_rows import _CONDITIONS, _TRANSFORMATIONS, read_rows
from dstrain.config.read import list_keys

ROW_KEYS = {"keys", "each", "of", "peek", "when", "as", "cases", "absent", "any of"}
CASE_KEYS = {
    "if", "as", "to", "to each", "value", "named value", "append", "override", "origin", "note", "quiet", "refuse",
    "fill in", "of", "name",
}  # fmt: skip


def cases(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from row.get("cases", [row])
    if "absent" in row:
        yield row["absent"]


ROWS = [
    pytest.param(row, id=f"{block} {index}") for block, rows in read_rows().items() for index, row in enumerate(rows)
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_only_what_exists(row: dict[str, Any]) -> None:
    assert row.keys() <= ROW_KEYS | CASE_KEYS
    assert (row.get("when") or {}).keys() <= _CONDITIONS.keys()
    for case in cases(row):
        assert case is row or case.keys() <= CASE_KEYS
        assert (case.get("if") or {}).keys() <= _CONDITIONS.keys()
        key = case.get("to", case.get("to each", "task"))
        assert not isinstance(key, str) or ".".join(key.split(".")[:2]) in list_keys()
    for transformation in [row.get("as"), *(case.get("as") for case in cases(row))]:
        kinds = transformation.keys() if isinstance(transformation, dict) else {transformation} - {None}
        assert kinds <= _TRANSFORMATIONS.keys() | {"join", "least"}
