"""Tables of series: CSV and parquet with a series per row. A table whose rows are time steps is refused."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import operator
import re
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dstrain.data.records import LABEL_NAMES, yaml_key
from dstrain.data.sources.base import Columns
from dstrain.data.sources.files import SOURCE_TYPES, RowsSource, file_extension, read_whole_file
from dstrain.data.sources.parquet import ParquetSource
from dstrain.files import display_path
from dstrain.task import DataError, DatasetConfig, Source, open_source
from dstrain.tasks.temporal.ts_files import TsSource

TEXT_COLUMNS = ("label", "caption", "prompt", "pattern", "id")
"""Columns that are not values of the series."""
INDEX_COLUMNS = ("", "index", "unnamed: 0", "__index_level_0__")
"""Names of a column that counts rows, whatever these are."""
TIME_COLUMNS = (*INDEX_COLUMNS, "timestamp", "time", "date", "datetime", "ds", "t")
"""Names of a first column that counts time: a row of such a table is a time step, not a series."""
MIN_ASCENDING_ROWS = 8
"""Rows from which on a first column in strict order counts time; by chance one order in 20,160 is strict."""
MIN_VALUES = 8
"""Columns of values below which a table of more rows, none of which has a text, is taken for one in time order."""
SEPARATORS = ";\t|"
_STEP_NAME = re.compile(r"(?:t|v|val|value|time|step)_?\d+", re.IGNORECASE)
"""Names of columns that are the time steps of a series, such as t0 and t1."""
_DATE = re.compile(r"\d{1,4}[-./]\d{1,2}(?:[-./]\d{1,4})?(?:[T ].*)?|\d{1,2}:\d\d(?::\d\d)?.*")
_DATE_FORMATS = ("%Y-%m", "%d.%m.%Y", "%d.%m.%Y %H:%M", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:[,_' ]\d{3})+(?:\.\d+)?")
"""A number whose thousands are separated."""
_MISSING_WORDS = {"na", "n/a", "#n/a", "null", "none", "nil", "missing", "-", "--", "?"}
_UCR_NAME = re.compile(r".*_(?:TRAIN|TEST)\.tsv(?:\.gz)?", re.IGNORECASE)
"""Files of the UCR archive of 2018: no header, and the label in the first column."""


@dataclass(frozen=True)
class TableHeader:
    """The columns of a table: as the file names them, and as they are read."""

    written: tuple[str, ...]
    names: tuple[str | None, ...]
    """As the recipe renames them; None: left out."""

    @classmethod
    def create(cls, written: Sequence[str], columns: Columns) -> TableHeader:
        """Return the header with the renaming of `data.columns`; text columns are lower case."""
        renamed = [columns.get(name, name) for name in written]
        return cls(tuple(written), tuple(name if name is None else _lower_text_column(name) for name in renamed))

    @property
    def kept(self) -> list[str]:
        return [name for name in self.names if name is not None]

    @property
    def value_columns(self) -> list[int]:
        """Positions of the columns of values."""
        return [at for at, name in enumerate(self.names) if name is not None and name not in TEXT_COLUMNS]

    @property
    def texts(self) -> list[str]:
        """The columns of texts."""
        return [name for name in self.kept if name in TEXT_COLUMNS]

    def check_names(self, name: str) -> None:
        """Raise DataError where a name is written twice, or where no column holds values; `name`: the file's."""
        counts = Counter(self.kept)
        doubled = next((column for column in self.kept if counts[column] > 1), None)
        if doubled is not None:
            raise DataError(f"{name}: the column '{doubled}' is written twice; rename one")
        if not self.value_columns:
            raise DataError(f"{name}: has no column of values; the first line names the columns")

    def check_label(self, name: str) -> None:
        """Raise DataError where the first or the last column of values is named as a label is."""
        if "label" in self.kept:
            return
        for at in (self.value_columns[0], self.value_columns[-1]):
            column = str(self.names[at])
            if column.lower() in LABEL_NAMES and len(self.value_columns) > 1:
                fix = f"if it is the label, rename it with data.columns {{{yaml_key(column)}: label}}; if it is a value"
                raise DataError(
                    f"{name}: the column '{column}' looks like the label; {fix}, {{{yaml_key(column)}: last}}"
                )


@dataclass(frozen=True)
class TableRows:
    """What the direction of a table shows in: its header, its first column and its number of rows."""

    name: str
    """The file's, for messages."""
    header: TableHeader
    first: Sequence[Any]
    """The values of the first column that is no text, left out or not: numbers, or texts such as dates."""
    first_at: int
    """Its position."""
    count: int
    """Number of rows that are series."""

    def check_direction(self, convert: ConvertCommand) -> None:
        """Raise DataError for a table whose rows are time steps. `convert`: command that makes one series of it."""
        header, column = self.header, self.header.written[self.first_at]
        has_id = "id" in header.kept
        others = [at for at in header.value_columns if at != self.first_at]
        order = "" if has_id or _STEP_NAME.fullmatch(column) else self._find_order(column)
        is_index = column.lower() in INDEX_COLUMNS or self._counts_rows()
        if order and not (is_index and header.names[self.first_at] is None):
            problem = f"the first column '{column}' counts time, so each row is a time step, and a row must be a series"
            fix = f"make one series of the table: {convert(others, order == 'down')}"
            if len(others) >= MIN_VALUES and is_index:
                fix = f"if it counts series, leave it out with data.columns {{{yaml_key(column)}: null}}; else {fix}"
            elif len(others) >= MIN_VALUES:
                fix += "; if each row is a series, give each a name in a column id"
            raise DataError(f"{self.name}: {problem} with one value per column; {fix}")
        values = header.value_columns
        is_step = all(_STEP_NAME.fullmatch(str(header.names[at])) for at in values)
        is_narrow = len(values) == 1 or (len(values) < MIN_VALUES and not header.texts and not is_step)
        if is_narrow and not has_id and self.count >= MIN_ASCENDING_ROWS and self.count > len(values):
            problem = f"has {self.count} rows and {len(values)} column{'s' * (len(values) != 1)} of values"
            told = f"{problem}, so each row looks like a time step, and a row must be a series"
            fix = f"make one series of the table: {convert(values, self._find_order(None) == 'down')}"
            raise DataError(f"{self.name}: {told}; {fix}; if each row is a series, give each a name in a column id")

    def _find_order(self, column: str | None) -> str:
        """Return `up` or `down` for a column that counts time; empty for another one.

        `column`: its name; None: the values alone decide.
        """
        numbers = [value for value in self.first if isinstance(value, int | float)]
        if len(numbers) == len(self.first) >= MIN_ASCENDING_ROWS:
            if all(map(operator.lt, numbers, numbers[1:])):
                return "up"
            if all(map(operator.gt, numbers, numbers[1:])):
                return "down"
        dates = [str(value).strip() for value in (*self.first[:1], *self.first[-1:])]
        if len(numbers) < len(self.first) and dates and _DATE.fullmatch(dates[0]):
            return "down" if _is_later(*dates) else "up"
        return "up" if column is not None and column.lower() in TIME_COLUMNS else ""

    def _counts_rows(self) -> bool:
        """Return whether the first column is 0, 1, 2, … or 1, 2, 3, …"""
        values = list(self.first)
        return bool(values) and values[0] in (0, 1) and values == [values[0] + at for at in range(len(values))]


def _is_later(first: str, last: str) -> bool:
    """Return whether the first of two dates is the later one; False where they have no known format."""
    for form in _DATE_FORMATS:
        with contextlib.suppress(ValueError):
            return datetime.strptime(first, form) > datetime.strptime(last, form)
    with contextlib.suppress(ValueError, TypeError):
        return datetime.fromisoformat(first) > datetime.fromisoformat(last)
    return False


class ConvertCommand(ABC):
    """A shell command that makes one series of a table in time order, with the columns of values as channels."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, columns: Sequence[int], is_reversed: bool) -> str:
        """Return the command for the columns of values at these positions; `is_reversed`: the newest row comes first."""
        source, target = self.path, _target(self.path, ".jsonl")
        return f'python -c "{self.program(columns, is_reversed)}" {shlex.quote(display_path(source))} > {target}'

    @abstractmethod
    def program(self, columns: Sequence[int], is_reversed: bool) -> str:
        """Return the Python program, without double quotes."""


@dataclass
class CsvCommand(ConvertCommand):
    """The command for a text table."""

    path: Path
    separator: str
    header_lines: int
    has_decimal_comma: bool = False

    def program(self, columns: Sequence[int], is_reversed: bool) -> str:
        """Return the Python program, without double quotes."""
        module = "gzip" if self.path.suffix.lower() == ".gz" else "io"
        separator = {"\t": "chr(9)"}.get(self.separator, f"'{self.separator}'")
        value = "v.replace(',', '.')" if self.has_decimal_comma else "v"
        order = "[::-1]" * is_reversed
        return (
            f"import csv, {module}, json, sys; "
            f"f = {module}.open(sys.argv[1], 'rt', encoding='utf-8-sig', newline=''); "
            f"r = [r for r in csv.reader(f, delimiter={separator}) if any(r)][{self.header_lines}:]{order}; "
            f"print(json.dumps({{'series': [[float({value}) if v.strip() else None for v in c] "
            f"for c in [[*zip(*r)][i] for i in {_range(columns)}]]}}))"
        )


@dataclass
class ParquetCommand(ConvertCommand):
    """The command for a parquet file."""

    path: Path

    def program(self, columns: Sequence[int], is_reversed: bool) -> str:
        order = "[::-1]" * is_reversed
        return (
            "import json, sys, pyarrow.parquet as p; t = p.read_table(sys.argv[1]); "
            f"print(json.dumps({{'series': [t.column(i).to_pylist(){order} for i in {_range(columns)}]}}))"
        )


def _range(numbers: Sequence[int]) -> str:
    """Return Python for the numbers: a table may have thousands of columns."""
    first, last = numbers[0], numbers[-1]
    is_dense = len(numbers) == last - first + 1 and len(numbers) > 3
    return f"range({first}, {last + 1})" if is_dense else repr([*numbers])


def _target(path: Path, suffix: str) -> str:
    """Return the quoted name of a file beside the path, with another suffix."""
    stem = path.name[: -len(file_extension(path.name))] if file_extension(path.name) else path.name
    return shlex.quote(display_path(path.with_name(f"{stem}{suffix}")))


class CsvSource(RowsSource):
    """The rows of a .csv or .tsv file: {"series": [...], "label", "caption", ...}. All in memory.

    The columns label, caption, prompt, pattern and id (in any case) are texts; all others are the values of one channel,
    in the order of the columns. An empty cell is a missing value; empty cells at the end of a row make a shorter series.
    Cells are separated by commas, semicolons, tabs or `|`, as the first line shows. Raises DataError for a file without a
    header, except where data.columns names its columns by number; a bad row is listed with its line.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path, columns)
        content = read_whole_file(path)
        text = self._decode(content)
        self._separator = find_separator(text, file_extension(path.name).startswith(".tsv"))
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=self._separator)
        self._command = CsvCommand(path, self._separator, 1)
        lines = list[tuple[int, list[str]]]()
        try:
            lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
        except csv.Error as fault:
            raise DataError(f"{self.name}:{reader.line_num}: {fault}; correct the quotes") from fault
        header, rows = self._read_header(lines)
        self._has_decimal_comma = self._separator != "," and self._writes_decimal_commas(header, rows)
        self._command.has_decimal_comma = self._has_decimal_comma
        for line, row in rows:
            self._add_row(line, read_row, header.names, row, self._has_decimal_comma)
        self._check_direction(header, [row for _, row in rows])
        self._set_digest(hashlib.sha256(content).hexdigest(), {*header.written})

    def _read_header(self, lines: list[tuple[int, list[str]]]) -> tuple[TableHeader, list[tuple[int, list[str]]]]:
        """Return the header and the rows after it. Raises DataError."""
        cells = [cell.strip() for cell in lines[0][1]] if lines else []
        if cells and cells[0].startswith("#"):
            fix = "remove the line, or its # where it names the columns"
            raise DataError(f"{self.name}:{lines[0][0]}: the first line is a comment; {fix}")
        by_number = any(name.isdigit() and name not in cells for name in self.columns) or self._is_numbered(cells)
        is_ucr = bool(_UCR_NAME.fullmatch(self.name)) and not self.columns and all(map(is_number, cells))
        if by_number or is_ucr:
            numbers = [str(at) for at in range(1, len(cells) + 1)]
            header = TableHeader.create(numbers, {"1": "label"} if is_ucr else self.columns)
            self._command.header_lines = 0
            header.check_names(self.name)
            return header, lines
        header = TableHeader.create(cells, self.columns)
        self._check_is_header(cells, header, [row for _, row in lines])
        header.check_names(self.name)
        if len(lines) <= MIN_ASCENDING_ROWS:
            header.check_label(self.name)
        return header, lines[1:]

    def _is_numbered(self, cells: list[str]) -> bool:
        return all(map(is_number, cells)) and any(name.isdigit() for name in self.columns)

    def _check_is_header(self, cells: list[str], header: TableHeader, rows: list[list[str]]) -> None:
        """Raise DataError where the first line is that of a series."""
        numbers = [is_number(name) for name in header.kept]
        texts = [name for name, is_value in zip(header.kept, numbers, strict=True) if not is_value]
        is_row = all(numbers) or (sum(numbers) > len(texts) and not any(name in TEXT_COLUMNS for name in texts))
        if not numbers or not is_row or any(name is None for name in header.names):
            return
        problem = "the first line holds numbers, but it must name the columns"
        if len(cells) == 1:
            self._command.header_lines = 0
            problem += ", and each line has one value"
            raise DataError(f"{self.name}:1: {problem}; make one series of the file: {self._command([0], False)}")
        at = cells.index(texts[0]) + 1 if texts else 1
        known = f"such as {{{yaml_key(str(at))}: label}}"
        known += "" if texts else ' where the first one is the label, or {"1": v1} where all are values'
        fix = f"name a column by its number, counted from 1, with data.columns, {known}"
        raise DataError(f"{self.name}:1: {problem}; add a line such as t0,t1,…,label, or {fix}")

    def _writes_decimal_commas(self, header: TableHeader, rows: list[tuple[int, list[str]]]) -> bool:
        """Return whether numbers have a decimal comma. Raises DataError where it may separate thousands."""
        cells = [row[at].strip() for _, row in rows for at in header.value_columns if at < len(row) and row[at].strip()]
        commas = [cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell)]
        if not commas or any("." in cell and is_number(cell) for cell in cells):
            return False  # cells with a comma are then bad rows
        if all(_GROUPED.fullmatch(cell) for cell in commas):
            text = f"'{commas[0]}' may have a decimal comma or a separator of thousands"
            source, target = shlex.quote(display_path(self._command.path)), _target(self._command.path, ".points.csv")
            fix = f"write a point for a decimal comma: sed 's/,/./g' {source} > {target}"
            raise DataError(f"{self.name}: {text}; {fix}")
        return True

    def _check_direction(self, header: TableHeader, rows: list[list[str]]) -> None:
        candidates = [at for at, name in enumerate(header.names) if name is None or name not in TEXT_COLUMNS]
        at = candidates[0]
        cells = [row[at].strip() for row in rows if at < len(row)]
        if self._has_decimal_comma:
            cells = [cell.replace(",", ".") for cell in cells]
        first = [float(cell) if is_number(cell) else cell for cell in cells if cell]
        TableRows(self.name, header, first, at, len(self._rows)).check_direction(self._command)
        header.check_label(self.name)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index][1]  # the header is renamed


def find_separator(text: str, is_tsv: bool) -> str:
    """Return what separates the cells, as the first line shows."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    if is_tsv and "\t" in first:
        return "\t"
    row = next(csv.reader([first]), [])
    return next((mark for mark in SEPARATORS if len(row) == 1 and mark in row[0]), ",")


def read_row(names: Sequence[str | None], row: Sequence[str], has_decimal_comma: bool = False) -> dict[str, Any]:
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
            continue
        text = cell.replace(",", ".") if has_decimal_comma and _DECIMAL_COMMA.fullmatch(cell.strip()) else cell
        if not text.strip():
            values.append(float("nan"))
        elif is_number(text):
            values.append(float(text))
        else:
            raise ValueError(describe_cell(name, cell.strip()))
    return {"series": trim_missing(values), **record}


def trim_missing(values: list[float]) -> list[float]:
    """Return the values without missing ones at the end, which make a shorter series."""
    while values and values[-1] != values[-1]:  # NaN
        values.pop()
    return values


def describe_cell(name: str, cell: str) -> str:
    """Return what is wrong with a cell of a column of values, and the fix."""
    where, quoted = f"column '{name}' has", f"'{cell[:20]}'"
    if cell.lower() in _MISSING_WORDS:
        return f"{where} {quoted}; leave the cell of a missing value empty"
    if cell.lower() in ("true", "false"):
        return f"{where} {quoted}; write 1 or 0"
    if cell.endswith("%") and is_number(cell[:-1]):
        return f"{where} {quoted}; write the number without the sign, {cell[:-1].strip()}"
    if _GROUPED.fullmatch(cell):
        return f"{where} {quoted}; write the number without separators of thousands, {re.sub('[,_ ]', '', cell)}"
    if _DECIMAL_COMMA.fullmatch(cell):
        return f"{where} {quoted}; write a point for the decimal comma, {cell.replace(',', '.')}"
    if re.sub("_", "", cell) != cell and is_number(cell.replace("_", "")):
        return f"{where} {quoted}; write the number as {cell.replace('_', '')}"
    column, problem = yaml_key(name), f"{where} text ({quoted}), not a number"
    if name.lower() in LABEL_NAMES:
        return f"{problem}; if it is the label, rename it with data.columns {{{column}: label}}; else correct it"
    texts = "the columns of texts are label, caption, prompt and id"
    return (
        f"{problem}; correct it, leave it empty, or, since {texts}, rename it with data.columns {{{column}: caption}}"
    )


def _lower_text_column(name: str) -> str:
    """Return the name; as lower case where it is that of a text: `Label` is no value of the series."""
    return name.lower() if name.lower() in TEXT_COLUMNS else name


def is_number(text: str) -> bool:
    """Return whether the text is a number: Python's float also takes `1_000` and the digits of other scripts."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text and text.isascii()


class SeriesParquetSource(ParquetSource):
    """The rows of a parquet file: with a column `series`, or with a column per value, as in a .csv file."""

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path, columns)
        import pyarrow

        schema = self._file.schema_arrow
        written = list(schema.names)
        self._header: TableHeader | None = None
        header = TableHeader.create(written, columns)
        nested = [name for name in schema if pyarrow.types.is_nested(name.type)]
        if "series" in header.kept or nested or not header.kept:
            return
        header.check_names(self.name)
        types = {str(column.name): column.type for column in schema}
        at = next(at for at, name in enumerate(header.names) if name is None or name not in TEXT_COLUMNS)
        first = self._file.read(columns=[written[at]]).column(0).to_pylist()
        TableRows(self.name, header, first, at, len(self)).check_direction(ParquetCommand(path))
        for place in header.value_columns:
            kind = types[written[place]]
            if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
                cell = f"a value of type {kind}"
                raise DataError(f"{self.name}: {describe_cell(str(header.names[place]), cell)}")
        header.check_label(self.name)
        self._header = header

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = super().__getitem__(index)
        if self._header is None:
            return record
        values, texts = list[float](), dict[str, Any]()
        for name, value in record.items():
            if _lower_text_column(name) in TEXT_COLUMNS:
                texts |= {} if value is None else {_lower_text_column(name): value}
            else:
                values.append(float("nan") if value is None else float(value))
        return {"series": trim_missing(values), **texts}


def _jsonl_command(program: str) -> str:
    return f'python -c "{program}" {{file}} > {{jsonl}}'


def _csv_command(program: str) -> str:
    return f'python -c "{program}" {{file}} > {{csv}}'


_LARGEST = "x = max({arrays}, key=lambda a: a.size); [print(json.dumps({{'series': s.tolist()}})) for s in x]"
_CONVERSIONS = {
    ".npy": _jsonl_command(
        "import json, numpy, sys; x = numpy.atleast_2d(numpy.load(sys.argv[1])); "
        "[print(json.dumps({'series': s.tolist()})) for s in x]"
    ),
    ".npz": _jsonl_command("import json, numpy, sys; " + _LARGEST.format(arrays="numpy.load(sys.argv[1]).values()")),
    ".mat": _jsonl_command(
        "import json, scipy.io, sys; d = scipy.io.loadmat(sys.argv[1]); "
        + _LARGEST.format(arrays="(v for k, v in d.items() if k[0] != '_')")
    ),
    ".h5": _jsonl_command(
        "import h5py, json, sys; d = []; h5py.File(sys.argv[1]).visititems("
        "lambda k, v: d.append(v[()]) if isinstance(v, h5py.Dataset) else None); " + _LARGEST.format(arrays="d")
    ),
    ".xlsx": _csv_command("import pandas, sys; pandas.read_excel(sys.argv[1]).to_csv(sys.stdout, index=False)"),
    ".feather": _csv_command("import pandas, sys; pandas.read_feather(sys.argv[1]).to_csv(sys.stdout, index=False)"),
    ".pkl": _csv_command("import pandas, sys; pandas.read_pickle(sys.argv[1]).to_csv(sys.stdout, index=False)"),
    ".arff": _csv_command(
        "import sys; t = [l.strip() for l in open(sys.argv[1])]; at = [l.lower() for l in t].index('@data'); "
        "print(','.join(l.split()[1].strip(chr(39)) for l in t[:at] if l.lower().startswith('@attribute'))); "
        "[print(l) for l in t[at + 1:] if l and l[0] != '%']"
    ),
    ".txt": "sed -E 's/^[[:space:]]+//; s/[[:space:]]+/,/g' {file} > {csv}",
}
_SAME = {".hdf5": ".h5", ".xls": ".xlsx", ".arrow": ".feather", ".pickle": ".pkl", ".dat": ".txt"}
_REMARKS = {
    ".npy": "the first axis counts series; add the labels as 'label'",
    ".pkl": "a pickle runs the code that it holds, so only if it is yours",
}
_REMARK_OF = {".npz": ".npy", ".mat": ".npy", ".h5": ".npy"}


def suggest_series_conversion(path: Path) -> str:
    """Return a clause with the command that makes a file of series of another format; empty for unknown ones."""
    ending = file_extension(path.name)
    ending = _SAME.get(ending, ending)
    command = _CONVERSIONS.get(ending)
    if command is None:
        return ""
    if ending == ".txt" and _has_ts_header(path):
        return f"; it is a .ts file: mv {shlex.quote(display_path(path))} {_target(path, '.ts')}"
    values = {"file": shlex.quote(display_path(path)), "jsonl": _target(path, ".jsonl"), "csv": _target(path, ".csv")}
    for name, value in values.items():
        command = command.replace(f"{{{name}}}", value)
    remark = _REMARKS.get(_REMARK_OF.get(ending, ending), "")
    return f"; convert it: {command}" + (f" ({remark})" if remark else "")


def _has_ts_header(path: Path) -> bool:
    with path.open("rb") as file:
        return any(line.strip().lower().startswith((b"@data", b"@problemname")) for line in _first_lines(file))


def _first_lines(file: Iterable[bytes]) -> Iterable[bytes]:
    return itertools.islice(file, 1000)


_SERIES_TYPES = {".ts": TsSource, ".csv": CsvSource, ".tsv": CsvSource}
SERIES_SOURCE_TYPES: Mapping[str, Callable[[Path, Columns], Source]] = {
    **SOURCE_TYPES,
    ".parquet": SeriesParquetSource,
    **_SERIES_TYPES,
    **{f"{ending}.gz": kind for ending, kind in _SERIES_TYPES.items()},
}
"""File extension -> source class."""


def open_series(path_or_config: str | Path | DatasetConfig, columns: Columns | None = None) -> Source:
    """Open a file of series as `open_source` does, a .ts, .csv or .tsv file too. Raises DataError."""
    return open_source(path_or_config, columns, SERIES_SOURCE_TYPES, suggest_series_conversion)
