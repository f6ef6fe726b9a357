"""Record source for .csv files of series: one series per row, one value per column."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.data.records import BadRow
from dstrain.data.sources.base import BaseSource
from dstrain.errors import DataError, one_line
from dstrain.files import display_path

TEXT_COLUMNS = ("label", "caption", "prompt", "pattern", "id")
"""Columns that are not values of the series."""


class CsvSource(BaseSource):
    """The rows of a .csv file with a header: {"series": [...], "label", "caption", ...}. All in memory.

    The columns label, caption, prompt, pattern and id (in any case) are texts; all others are the values of one channel, in the
    order of the columns. An empty cell is a missing value; empty cells at the end of a row make a shorter series.
    Raises DataError for a file without a header; a bad row is listed with its line.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(display_path(path), path.parent, columns)
        content = path.read_bytes()
        try:
            reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        except UnicodeDecodeError as fault:
            raise DataError(f"{self.name} is not valid UTF-8 (byte {fault.start + 1}); re-save it as UTF-8") from fault
        self._rows: list[tuple[int, dict[str, Any]]] = []
        names: list[str] | None = None
        self._written: set[str] = set()
        try:
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if names is None:
                    names = self._read_header(row)
                    continue
                self._add_row(reader.line_num, names, row)
        except csv.Error as fault:
            raise DataError(f"{self.name}:{reader.line_num}: {fault}; correct the quotes") from fault
        self._set_digest(hashlib.sha256(content).hexdigest(), self._written)

    def _read_header(self, row: list[str]) -> list[str]:
        self._written = {cell.strip() for cell in row}
        if separator := next((mark for mark in ";\t|" if len(row) == 1 and mark in row[0]), None):
            raise DataError(f"{self.name}:1: the cells are separated by {separator!r}; write commas instead")
        names = [_lower_text_column(self.columns.get(cell.strip(), cell.strip())) for cell in row]
        counts = Counter(names)
        if doubled := next((name for name in names if counts[name] > 1), None):
            raise DataError(f"{self.name}:1: the column '{doubled}' is written twice; rename one")
        if not any(name not in TEXT_COLUMNS for name in names):
            raise DataError(f"{self.name}:1: has no column of values; the first line names the columns")
        if all(_is_number(name) for name in names):
            problem = "the first line holds numbers, but it must name the columns"
            raise DataError(f"{self.name}:1: {problem}; add a line such as t0,t1,…,label")
        return names

    def _add_row(self, number: int, names: list[str], row: list[str]) -> None:
        try:
            self._rows.append((number, read_row(names, row)))
        except ValueError as fault:
            self.bad_rows.append(BadRow(f"{self.name}:{number}", one_line(str(fault))))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index][1]

    def location(self, index: int) -> str:
        return f"{self.name}:{self._rows[index][0]}"


def read_row(names: list[str], row: list[str]) -> dict[str, Any]:
    """Return the record of a row. Raises ValueError with the reason."""
    if len(row) != len(names):
        raise ValueError(f"has {len(row)} cells, and the header has {len(names)} columns; correct one of them")
    record: dict[str, Any] = {}
    values: list[float] = []
    for name, cell in zip(names, row, strict=True):
        if name in TEXT_COLUMNS:
            record |= {name: cell.strip()} if cell.strip() else {}
        elif not cell.strip():
            values.append(float("nan"))
        elif _is_number(cell):
            values.append(float(cell))
        else:
            raise ValueError(f"'{cell.strip()[:20]}' in column '{name}' is not a number; correct it, or leave it empty")
    while values and values[-1] != values[-1]:  # NaN
        values.pop()
    return {"series": values, **record}


def _lower_text_column(name: str) -> str:
    """Return the name; as lower case where it is that of a text: `Label` is no value of the series."""
    return name.lower() if name.lower() in TEXT_COLUMNS else name


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
