"""Tables of series: each is read, or refused with a remedy, which is carried out here and then works."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dstrain.commands.data import check_file, show_validation
from dstrain.data.prepare import ValidationReport
from dstrain.errors import DataError
from tests.vocabulary import write_jsonl

ROWS = [[math.sin(step / 3 + row) for step in range(16)] for row in range(6)]
HEAD = [f"v{step}" for step in range(16)]
LABELS = ["up", "down"] * 3


def write_table(
    path: Path, separator: str = ",", decimal: str = ".", head: bool = True, first: bool = False, label: str = "label"
) -> Path:
    """Write the six series with their labels, one in each row."""
    names = [label, *HEAD] if first else [*HEAD, label]
    lines = [names] if head else []
    for row, text in zip(ROWS, LABELS, strict=True):
        cells = [f"{value:.3f}".replace(".", decimal) for value in row]
        lines.append([text, *cells] if first else [*cells, text])
    path.write_text("".join(separator.join(line) + "\n" for line in lines))
    return path


def check(file: Path, stage: str = "classify", columns: dict[str, Any] | None = None) -> ValidationReport:
    """Return the report of `dstrain data check`."""
    settings = [f"options.stage={stage}", *([f"data.columns={json.dumps(columns)}"] if columns else [])]
    return check_file(str(file), "temporal", settings)[0]


def shape(file: Path, stage: str = "classify", columns: dict[str, Any] | None = None) -> str:
    """Return the shape that `dstrain data check` says of a file without bad records."""
    found = check(file, stage, columns)
    assert not found.bad, found.bad
    (report,) = found.columns.values()
    return str(report["content"][0])


def refuse(file: Path, stage: str = "classify", columns: dict[str, Any] | None = None) -> str:
    with pytest.raises(DataError) as refused:
        check(file, stage, columns)
    return str(refused.value)


def run_remedy(message: str, folder: Path) -> Path:
    """Run the command of a message, as a user would, and return the file that it writes or renames."""
    found = re.search(r"((?:python -c|sed|mv) .*?(?:> | )(\S+\.(?:jsonl|csv|ts)))(?:;| \(|$)", message)
    assert found, message
    link = folder / "bin" / "python"
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{link.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(["bash", "-ec", found[1]], cwd=folder, env=environment, check=True, timeout=120)
    return folder / found[2]


def columns_of(message: str) -> dict[str, Any]:
    """Return the first data.columns that a message proposes."""
    found = re.search(r"data\.columns,?(?: such as)? (\{.*?\})", message)
    assert found, message
    columns: dict[str, Any] = yaml.safe_load(found[1])
    return columns


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("x.csv", {}),
        ("x.csv", {"separator": ";"}),
        ("x.csv", {"separator": ";", "decimal": ","}),
        ("x.tsv", {"separator": "\t", "decimal": ","}),
        ("x.tsv", {"separator": "\t"}),
        ("x.csv", {"separator": "\t"}),
        ("x.csv", {"separator": "|"}),
        ("x.csv", {"first": True}),
    ],
)
def test_cells_may_be_separated_by_any_mark(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    assert shape(write_table(tmp_path / name, **settings)) == "6 series: 1 channel, 16 values"


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_a_packed_table_is_the_table(name: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / name, separator="\t" if name.endswith("tsv") else ",")
    subprocess.run(["gzip", path], check=True)
    assert shape(tmp_path / f"{name}.gz") == "6 series: 1 channel, 16 values"


def test_a_comma_that_may_separate_thousands_is_not_guessed(tmp_path: Path) -> None:
    lines = ["v0;v1;label", *[f"1,{row}00;2,{row}50;up" for row in range(1, 7)]]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    message = refuse(tmp_path / "x.csv")
    assert "'1,100' may have a decimal comma or a separator of thousands" in message
    assert shape(run_remedy(message, tmp_path)) == "6 series: 1 channel, 2 values"


@pytest.mark.parametrize("label", ["class", "target", "y"])
def test_the_column_that_looks_like_the_label_is_named(label: str, tmp_path: Path) -> None:
    message = refuse(write_table(tmp_path / "x.csv", label=label), "masked")
    assert columns_of(message) == {label: "label"}
    assert shape(tmp_path / "x.csv", "masked", columns_of(message)) == "6 series: 1 channel, 16 values"
    record = {"series": ROWS[0], label: "up"}
    path = write_jsonl(tmp_path / "x.jsonl", [record])
    (bad,) = check(path).bad
    assert columns_of(bad.reason) == {label: "label"}
    assert shape(path, columns=columns_of(bad.reason)) == "1 series: 1 channel, 16 values"


@pytest.mark.parametrize(("first", "column"), [(True, "1"), (False, "17")])
def test_a_table_without_a_header_is_read_where_a_column_is_named_by_number(
    first: bool, column: str, tmp_path: Path
) -> None:
    message = refuse(write_table(tmp_path / "x.csv", head=False, first=first))
    assert columns_of(message) == {column: "label"}
    assert shape(tmp_path / "x.csv", columns={column: "label"}) == "6 series: 1 channel, 16 values"


@pytest.mark.parametrize("name", ["ucr2018.tsv", "GunPoint_TRAIN.tsv"])
def test_files_of_the_ucr_archive_of_2018(name: str, tmp_path: Path) -> None:
    rows = ["\t".join([str(at % 2), *[f"{value:.3f}" for value in row]]) for at, row in enumerate(ROWS)]
    (tmp_path / name).write_text("\n".join(rows) + "\n")
    columns = None
    if "TRAIN" not in name:
        message = refuse(tmp_path / name)
        columns = columns_of(message)
        assert columns == {"1": "label"}
        assert shape(tmp_path / name, "masked", {"1": "v1"}) == "6 series: 1 channel, 17 values"
    assert shape(tmp_path / name, columns=columns) == "6 series: 1 channel, 16 values"


def time_table(dates: list[Any], columns: int, names: str = "Date", separator: str = ",") -> str:
    """Return a table in time order with a column of dates, unless `names` is empty, and columns of values."""
    head = [*([names] if names else []), *["speed", "heat", "load"][:columns]]
    lines = [separator.join(head)]
    for at, date in enumerate(dates):
        cells = [f"{math.sin(at / 5 + column):.3f}" for column in range(columns)]
        lines.append(separator.join([*([str(date)] if names else []), *cells]))
    return "\n".join(lines) + "\n"


MONTHS = [f"{1949 + at // 12}-{at % 12 + 1:02}" for at in range(144)]
DAYS = [f"{at % 28 + 1:02}.{at // 28 + 1:02}.2024" for at in range(144)]
TIME_TABLES: dict[str, tuple[str, int, bool]] = {
    "months": (time_table(MONTHS, 1), 1, False),
    "months, newest first": (time_table(MONTHS[::-1], 1), 1, True),
    "days of another calendar, newest first": (time_table(DAYS[::-1], 2, "Datum", ";"), 2, True),
    "a counter of another name": (time_table([*range(144)], 2, "zeit"), 2, False),
    "a counter, newest first": (time_table([*range(144)][::-1], 2, "zeit"), 2, True),
    "seconds": (time_table([at / 10 for at in range(144)], 3, "sec"), 3, False),
    "no column of time": (time_table([*range(144)], 2, ""), 2, False),
    "one column": (time_table([*range(144)], 1, ""), 1, False),
    "no header": (time_table([*range(144)], 1, "").split("\n", 1)[1], 1, False),
}


@pytest.mark.parametrize("case", TIME_TABLES)
def test_the_remedy_for_a_table_in_time_order_makes_one_series(case: str, tmp_path: Path) -> None:
    text, channels, is_reversed = TIME_TABLES[case]
    (tmp_path / "x.csv").write_text(text)
    message = refuse(tmp_path / "x.csv", "masked")
    assert "null" not in message
    made = run_remedy(message, tmp_path)
    assert shape(made, "masked") == f"1 series: {channels} channel{'s' * (channels > 1)}, 144 values"
    series = np.array(json.loads(made.read_text())["series"])
    wanted = [[math.sin(at / 5 + column) for at in range(144)] for column in range(channels)]
    np.testing.assert_allclose(series, np.array(wanted)[:, :: -1 if is_reversed else 1], atol=6e-4)


@pytest.mark.parametrize("case", ["months", "a counter of another name", "seconds"])
def test_leaving_the_time_out_does_not_switch_the_check_off(case: str, tmp_path: Path) -> None:
    """The old message proposed {"Date": null}, and 144 months became 144 series of one value."""
    (tmp_path / "x.csv").write_text(TIME_TABLES[case][0])
    name = TIME_TABLES[case][0].split(",")[0]
    message = refuse(tmp_path / "x.csv", "masked", {name: None})
    assert "make one series of the table" in message
    assert re.match(r"1 series: .* 144 values", shape(run_remedy(message, tmp_path), "masked"))


def test_rows_with_an_id_are_series_whatever_their_order(tmp_path: Path) -> None:
    lines = TIME_TABLES["no column of time"][0].splitlines()
    assert "give each a name in a column id" in refuse(_write(tmp_path, lines), "masked")
    named = [f"{line},{at or 'id'}" for at, line in enumerate(lines)]
    assert shape(_write(tmp_path, named), "masked") == "144 series: 1 channel, 2 values"


def _write(folder: Path, lines: list[str]) -> Path:
    (folder / "x.csv").write_text("\n".join(lines) + "\n")
    return folder / "x.csv"


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "index", "no"])
def test_a_column_that_counts_series_can_be_left_out(name: str, tmp_path: Path) -> None:
    lines = [",".join([name, *HEAD])]
    lines += [",".join(map(str, [at, *ROWS[at % 6]])) for at in range(12)]
    message = refuse(_write(tmp_path, lines), "masked")
    assert columns_of(message) == {name: None}
    assert shape(tmp_path / "x.csv", "masked", columns_of(message)) == "12 series: 1 channel, 16 values"


def test_dates_before_many_values_are_no_counter(tmp_path: Path) -> None:
    lines = [",".join(["day", *[f"sensor{at}" for at in range(9)]])]
    lines += [",".join([f"2024-01-{at + 1:02}", *map(str, ROWS[at % 6][:9])]) for at in range(12)]
    message = refuse(_write(tmp_path, lines), "masked")
    assert "null" not in message
    assert shape(run_remedy(message, tmp_path), "masked") == "1 series: 9 channels, 12 values"
    assert "make one series" in refuse(tmp_path / "x.csv", "masked", {"day": None})


CELLS = {
    "NA": ("leave the cell of a missing value empty", ""),
    "null": ("leave the cell of a missing value empty", ""),
    "True": ("write 1 or 0", "1"),
    "12%": ("write the number without the sign, 12", "12"),
    '"1,000.5"': ("write the number without separators of thousands, 1000.5", "1000.5"),
    "1_000": ("write the number without separators of thousands, 1000", "1000"),
    "1_0": ("write the number as 10", "10"),
    '"0,5"': ("write a point for the decimal comma, 0.5", "0.5"),
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_that_is_no_number_has_its_own_fix(cell: str, tmp_path: Path) -> None:
    fix, right = CELLS[cell]
    text = f"v0,v1,v2,label\n1,{cell},3,up\n"
    (tmp_path / "x.csv").write_text(text)
    (bad,) = check(tmp_path / "x.csv").bad
    assert bad.reason == f"column 'v1' has '{cell.strip(chr(34))}'; {fix}"
    (tmp_path / "x.csv").write_text(text.replace(cell, right))
    assert shape(tmp_path / "x.csv") == "1 series: 1 channel, 3 values"


def test_a_wide_parquet_file_is_read_as_the_csv_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(ROWS, columns=HEAD).assign(label=LABELS)
    frame.loc[0, "v15"] = None
    frame.to_parquet(tmp_path / "x.parquet")
    assert shape(tmp_path / "x.parquet") == "6 series: 1 channel, 15, 16, 16 values (min, median, max)"
    frame.rename(columns={"label": "class"}).to_parquet(tmp_path / "y.parquet")
    assert columns_of(refuse(tmp_path / "y.parquet")) == {"class": "label"}
    assert shape(tmp_path / "y.parquet", columns={"class": "label"}).startswith("6 series: 1 channel, 15")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_parquet_file_in_time_order_is_refused_with_a_remedy(is_reversed: bool, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"at": pandas.date_range("2024-01-01", periods=40), "speed": range(40)})
    (frame[::-1] if is_reversed else frame).to_parquet(tmp_path / "x.parquet", index=False)
    made = run_remedy(refuse(tmp_path / "x.parquet", "masked"), tmp_path)
    assert shape(made, "masked") == "1 series: 1 channel, 40 values"
    assert json.loads(made.read_text())["series"] == [[*range(40)]]
    assert "make one series" in refuse(tmp_path / "x.parquet", "masked", {"at": None})


def write_foreign(path: Path) -> None:
    """Write the six series in the format of the suffix, with the library that does it, or skip the test."""
    arrays, kind = np.array(ROWS), path.suffix
    if kind == ".npy":
        np.save(path, arrays)
    elif kind == ".npz":
        np.savez(path, X=arrays, y=np.arange(6))
    elif kind == ".mat":
        pytest.importorskip("scipy.io").savemat(path, {"X": arrays, "y": np.arange(6)})
    elif kind == ".h5":
        with pytest.importorskip("h5py").File(path, "w") as file:
            file["group/X"], file["y"] = arrays, np.arange(6)
    elif kind == ".arff":
        head = "".join(f"@attribute {name} numeric\n" for name in HEAD) + "@attribute label {up,down}\n"
        rows = [",".join(map(str, [*row, label])) for row, label in zip(ROWS, LABELS, strict=True)]
        path.write_text(f"% made by hand\n@relation x\n{head}@data\n" + "\n".join(rows) + "\n")
    elif kind == ".txt":
        rows = ["  ".join(["", *[f"{value:.7e}" for value in row]]) for row in ROWS]
        path.write_text("\n".join([" ".join(HEAD), *rows]) + "\n")
    else:
        frame = pytest.importorskip("pandas").DataFrame(ROWS, columns=HEAD)
        if kind == ".xlsx":
            pytest.importorskip("openpyxl")
        write = {".xlsx": frame.to_excel, ".feather": frame.to_feather, ".pkl": frame.to_pickle}[kind]
        write(path, **({"index": False} if kind == ".xlsx" else {}))


@pytest.mark.parametrize("ending", [".npy", ".npz", ".mat", ".h5", ".xlsx", ".feather", ".pkl", ".arff", ".txt"])
def test_the_conversion_of_another_format_works(ending: str, tmp_path: Path) -> None:
    write_foreign(tmp_path / f"x{ending}")
    message = refuse(tmp_path / f"x{ending}", "masked")
    assert f"ends in '{ending}'" in message
    assert shape(run_remedy(message, tmp_path), "masked") == "6 series: 1 channel, 16 values"


def test_a_ts_file_of_another_name_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("@problemName x\n@univariate true\n@classLabel true up\n@data\n1,2,3:up\n")
    assert shape(run_remedy(refuse(tmp_path / "x.txt"), tmp_path)) == "1 series: 1 channel, 3 values"


def test_a_table_is_quoted_in_its_command(tmp_path: Path) -> None:
    (tmp_path / "a b$1.csv").write_text(TIME_TABLES["months"][0])
    message = refuse(tmp_path / "a b$1.csv", "masked")
    command = message[message.index("python -c") :]
    python = command.replace("python", sys.executable, 1)
    subprocess.run(["bash", "-ec", python], cwd=tmp_path, check=True, timeout=60)
    assert shape(tmp_path / "a b$1.jsonl", "masked") == "1 series: 1 channel, 144 values"


SHAPES = {
    "a list of values": ([1.0, 2.0, 3.0] * 4, "1 series: 1 channel, 12 values", []),
    "one value": ([1.0], "1 series: 1 channel, 1 value", ["fewer values than options.encoder.patch_length (8)"]),
    "channels": ([[1.0, 2.0] * 6] * 3, "1 series: 3 channels, 12 values", []),
    "steps of channels": (
        [[float(step), 1.0, 2.0] for step in range(16)],
        "1 series: 16 channels, 3 values",
        ["fewer values than channels", "fewer values than options.encoder.patch_length (8)"],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_shape_is_said_and_an_unusual_one_noted(case: str, tmp_path: Path) -> None:
    series, told, notes = SHAPES[case]
    found = check(write_jsonl(tmp_path / "x.jsonl", [{"series": series, "label": "up"}]))
    (report,) = found.columns.values()
    assert report["content"] == [told]
    assert [note.split(" in 1 series")[0] for note in report["notes"]] == notes
    assert told in show_validation(found)[1]
    for note in report["notes"]:
        if expression := re.search(r"in Python (\S+)", note):
            turned = [[*channel] for channel in eval(expression[1], {"series": series})]
            made = write_jsonl(tmp_path / "y.jsonl", [{"series": turned, "label": "up"}])
            assert shape(made) == "1 series: 3 channels, 16 values"


def test_pairs_of_time_and_value_are_refused(tmp_path: Path) -> None:
    series = [[step, math.sin(step)] for step in range(16)]
    (bad,) = check(write_jsonl(tmp_path / "x.jsonl", [{"series": series, "label": "up"}])).bad
    expression = re.search(r"in Python (.*)$", bad.reason)
    assert expression
    values = eval(expression[1], {"series": series})
    assert (
        shape(write_jsonl(tmp_path / "y.jsonl", [{"series": values, "label": "up"}]))
        == "1 series: 1 channel, 16 values"
    )


@pytest.mark.parametrize("key", ["values", "target"])
def test_a_series_of_another_name_is_named(key: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"start": "2024-01-01", key: ROWS[0], "label": "up"}])
    (bad,) = check(path).bad
    assert columns_of(bad.reason) == {key: "series"}
    assert shape(path, columns={key: "series"}) == "1 series: 1 channel, 16 values"
