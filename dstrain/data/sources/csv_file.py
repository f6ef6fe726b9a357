"""Record source for .csv files of series: one series per row, one value per column."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

from dstrain.data.records import BadRow
from dstrain.data.sources.base import BaseSource, Columns
from dstrain.errors import DataError, one_line
from dstrain.files import display_path

TEXT_COLUMNS = ("label", "caption", "prompt", "pattern", "id")
"""Columns that are not values of the series."""
TIME_COLUMNS = ("", "timestamp", "time", "date", "datetime", "index", "ds", "t", "unnamed: 0")
"""Names of a first column that counts time: a row of such a table is a time step, not a series."""
MIN_ASCENDING_ROWS = 8
"""Rows from which on a strictly ascending first column counts time; by chance one order in 40,320 is ascending."""


class CsvSource(BaseSource):
    """The rows of a .csv file with a header: {"series": [...], "label", "caption", ...}. All in memory.

    The columns label, caption, prompt, pattern and id (in any case) are texts; all others are the values of one channel, in the
    order of the columns. An empty cell is a missing value; empty cells at the end of a row make a shorter series.
    Raises DataError for a file without a header; a bad row is listed with its line.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(display_path(path), path.parent, columns)
        content = path.read_bytes()
        try:
            reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        except UnicodeDecodeError as fault:
            raise DataError(f"{self.name} is not valid UTF-8 (byte {fault.start + 1}); re-save it as UTF-8") from fault
        self._rows: list[tuple[int, dict[str, Any]]] = []
        names: list[str | None] | None = None
        self._written: set[str] = set()
        try:
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if names is None:
                    names = self._read_header(row)
                    continue
                self._add_row(reader.line_num, names, row)
            self._check_rows_are_series(names or [])
        except csv.Error as fault:
            raise DataError(f"{self.name}:{reader.line_num}: {fault}; correct the quotes") from fault
        self._set_digest(hashlib.sha256(content).hexdigest(), self._written)

    def _read_header(self, row: list[str]) -> list[str | None]:
        self._written = {cell.strip() for cell in row}
        if separator := next((mark for mark in ";\t|" if len(row) == 1 and mark in row[0]), None):
            raise DataError(f"{self.name}:1: the cells are separated by {separator!r}; write commas instead")
        renamed = [self.columns.get(cell.strip(), cell.strip()) for cell in row]
        names = [name if name is None else _lower_text_column(name) for name in renamed]
        kept = [name for name in names if name is not None]
        counts = Counter(kept)
        if doubled := next((name for name in kept if counts[name] > 1), None):
            raise DataError(f"{self.name}:1: the column '{doubled}' is written twice; rename one")
        if not any(name not in TEXT_COLUMNS for name in kept):
            raise DataError(f"{self.name}:1: has no column of values; the first line names the columns")
        if all(_is_number(name) for name in kept):
            problem = "the first line holds numbers, but it must name the columns"
            raise DataError(f"{self.name}:1: {problem}; add a line such as t0,t1,…,label")
        # `t0,t1,t2` are time steps of one series; `t,value` is a table of time steps.
        if kept[0].lower() in TIME_COLUMNS:
            raise self._time_order_error(kept[0])
        return names

    def _check_rows_are_series(self, names: list[str | None]) -> None:
        """Raise DataError where the first value of each row is larger than that of the row before."""
        first = [row["series"][0] for _, row in self._rows if row["series"]]
        if len(first) >= MIN_ASCENDING_ROWS and all(left < right for left, right in itertools.pairwise(first)):
            raise self._time_order_error(next(name for name in names if name and name not in TEXT_COLUMNS))

    def _time_order_error(self, column: str) -> DataError:
        """Return the error for a table whose rows are time steps."""
        problem = f"the first column '{column}' counts time, so each row is a time step, and a row must be a series"
        fix = f'write one series per row, or leave the column out with data.columns {{"{column}": null}}'
        return DataError(f"{self.name}: {problem} with one value per column; {fix}")

    def _add_row(self, number: int, names: list[str | None], row: list[str]) -> None:
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


def read_row(names: list[str | None], row: list[str]) -> dict[str, Any]:
    """Return the record of a row. Raises ValueError with the reason."""
    if len(row) != len(names):
        raise ValueError(f"has {len(row)} cells, and the header has {len(names)} columns; correct one of them")
    record: dict[str, Any] = {}
    values: list[float] = []
    for name, cell in zip(names, row, strict=True):
        if name is None:
            continue
        if name in TEXT_COLUMNS:
            record |= {name: cell.strip()} if cell.strip() else {}
        elif not cell.strip():
            values.append(float("nan"))
        elif _is_number(cell):
            values.append(float(cell))
        else:
            texts = "label, caption, prompt and id"
            raise ValueError(
                f"column '{name}' has text ('{cell.strip()[:20]}'), not a number; correct it, leave it empty, or, since the "
                f"columns of texts are {texts}, rename it with data.columns {{{name}: caption}}"
            )
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
