"""Files of series: .ts and .csv are read strictly, and every fault has its line."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from dstrain.data.prepare import group_by_reason
from dstrain.data.sources.base import Source
from dstrain.data.sources.open import SERIES_SOURCE_TYPES, open_source
from dstrain.errors import DataError

HEADER = (
    "#about\n@problemName P\n@timeStamps false\n@missing true\n@univariate false\n@dimension 2\n@classLabel true a b\n"
)


def read(folder: Path, name: str, text: str) -> Source:
    (folder / name).write_text(text)
    return open_source(folder / name, source_types=SERIES_SOURCE_TYPES)


def reasons(source: Source) -> list[tuple[str, str]]:
    return [(row.location.rpartition("/")[2], row.reason) for row in source.bad_rows]


def test_a_ts_file_gives_channels_and_a_label(tmp_path: Path) -> None:
    source = read(tmp_path, "x.ts", HEADER + "@data\n1,2.5,-3e1:4,?,6:b\n\n1:2:a\n")
    assert len(source) == 2
    assert source[0]["label"] == "b"
    first, second = source[0]["series"]
    assert first == [1, 2.5, -30]
    assert second[::2] == [4, 6]
    assert math.isnan(second[1])
    assert source[1] == {"series": [[1], [2]], "label": "a"}
    assert source.location(1).endswith("x.ts:11")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,2:3,4:c", r"the label 'c' is not in @classLabel (a, b); correct one of them"),
        ("1,2:a", "has 1 channels, and the header says 2; correct one of them"),
        ("1,x:3,4:a", "'x' in channel 1 is not a number; correct it, or write ? for a missing value"),
        ("1,,2:3,4,5:a", "'' in channel 1 is not a number; correct it, or write ? for a missing value"),
        ("(0,1),(1,2):3,4:a", "has timestamps, which are not supported; write the values alone"),
        ("1,2", "has no label after the last colon; add one"),
    ],
)
def test_a_bad_line_of_a_ts_file_is_a_bad_row(line: str, reason: str, tmp_path: Path) -> None:
    source = read(tmp_path, "x.ts", f"{HEADER}@data\n1,2:3,4:a\n{line}\n")
    assert len(source) == 1
    assert reasons(source) == [("x.ts:10", reason)]


def test_a_length_in_the_header_is_checked(tmp_path: Path) -> None:
    source = read(
        tmp_path, "x.ts", "@univariate true\n@equalLength true\n@seriesLength 3\n@classLabel false\n@data\n1,2\n1,2,3\n"
    )
    assert reasons(source) == [("x.ts:6", "has 2 values, and @seriesLength is 3; correct one of them")]
    assert source[0] == {"series": [[1, 2, 3]]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("@timeStamps true\n@data\n", r"x\.ts:1: timestamps are not supported"),
        ("@colour red\n@data\n", r"x\.ts:1: @colour is not a key of the \.ts format"),
        ("@missing true\n@missing true\n@data\n", r"x\.ts:2: @missing is written twice"),
        ("@classLabel true\n@data\n", r"x\.ts:1: @classLabel true has no labels"),
        ("@targetLabel true\n@data\n", r"x\.ts:1: a regression target is not supported"),
        ("@seriesLength many\n@data\n", r"x\.ts:1: @seriesLength is followed by many; write a whole number"),
        ("@univariate perhaps\n@data\n", r"x\.ts:1: @univariate is followed by perhaps; write true or false"),
        ("1,2,3:a\n", r"x\.ts:1: a line before @data begins with @ or #"),
        ("@missing false\n", r"x\.ts has no line @data"),
    ],
)
def test_a_bad_header_of_a_ts_file_is_refused(header: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, "x.ts", header)


def test_a_csv_file_gives_a_series_per_row(tmp_path: Path) -> None:
    source = read(tmp_path, "x.csv", 't0,t1,t2,label,caption\n1,2,3,up,"rises, slowly"\n4,,6,,falls\n7,,,down,\n')
    assert source[0] == {"series": [1, 2, 3], "label": "up", "caption": "rises, slowly"}
    assert math.isnan(source[1]["series"][1])
    assert "label" not in source[1]
    assert source[2] == {"series": [7], "label": "down"}, "empty cells at the end are a shorter series"


def test_columns_of_a_csv_file_can_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b,class\n1,2,up\n")
    source = open_source(tmp_path / "x.csv", {"class": "label"}, SERIES_SOURCE_TYPES)
    assert source[0] == {"series": [1, 2], "label": "up"}


def test_bad_rows_of_a_csv_file_have_their_line(tmp_path: Path) -> None:
    source = read(tmp_path, "x.csv", "t0,t1,label\n1,x,up\n1,2\n1,2,up\n")
    assert reasons(source) == [
        (
            "x.csv:2",
            "column 't1' has text ('x'), not a number; correct it, leave it empty, or, since the columns of texts are "
            "label, caption, prompt and id, rename it with data.columns {t1: caption}",
        ),
        ("x.csv:3", "has 2 cells, and the header has 3 columns; correct one of them"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n4,5,6\n", "the first line holds numbers, but it must name the columns"),
        ("t,t\n1,2\n", "the column 't' is written twice"),
        ("label,caption\na,b\n", "has no column of values"),
        ('t0,t1\n1,"2\n', "correct the quotes"),
        ("t0;t1;label\n1;2;up\n", "the cells are separated by ';'; write commas instead"),
        ("t0\tt1\n1\t2\n", r"the cells are separated by '\\t'; write commas instead"),
    ],
)
def test_a_csv_file_without_a_usable_header_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, "x.csv", text)


@pytest.mark.parametrize(
    "text",
    [
        ",value\n0,269\n1,321\n",  # aeon's Lynx.csv
        "timestamp,value,is_anomaly\n" + "".join(f"{row},{row % 3},0\n" for row in range(20)),
        "Date,x\n1,2\n3,4\n",
        "a,b\n" + "".join(f"{row},{row % 3}\n" for row in range(9)),
    ],
)
def test_a_table_whose_rows_are_time_steps_is_refused(text: str, tmp_path: Path) -> None:
    """formats.md B1: 114 years became 114 series of two values."""
    with pytest.raises(DataError, match=r"counts time, so each row is a time step, and a row must be a series"):
        read(tmp_path, "x.csv", text)


def test_a_column_that_counts_rows_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("index,t0,t1\n" + "".join(f"{row},{row % 3},{row % 5}\n" for row in range(9)))
    source = open_source(tmp_path / "x.csv", {"index": None}, SERIES_SOURCE_TYPES)
    assert source[4] == {"series": [1, 4]}


def test_texts_in_a_column_of_values_are_one_kind_of_fault(tmp_path: Path) -> None:
    source = read(
        tmp_path, "x.csv", "t0,text\n" + "".join(f"{row % 2},it rises in {row} and falls\n" for row in range(30))
    )
    assert len(group_by_reason(source.bad_rows)) == 1


def test_a_problem_name_may_be_written_twice(tmp_path: Path) -> None:
    text = "@problemName A\n@problemName B\n@univariate true\n@classLabel false\n@data\n1,2\n"
    assert read(tmp_path, "x.ts", text)[0] == {"series": [[1, 2]]}


def test_a_label_column_in_capitals_is_no_value_of_the_series(tmp_path: Path) -> None:
    assert read(tmp_path, "x.csv", "t0,t1,Label\n1,2,3\n")[0] == {"series": [1, 2], "label": "3"}


def test_a_csv_file_of_100_000_columns_is_read_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    source = read(tmp_path, "x.csv", f"{','.join(f't{at}' for at in range(100_000))}\n{'1,' * 99_999}2\n")
    assert len(source[0]["series"]) == 100_000
    assert time.monotonic() - start < 20


def test_other_tasks_read_no_files_of_series(tmp_path: Path) -> None:
    (tmp_path / "x.ts").write_text("@data\n1,2\n")
    with pytest.raises(DataError, match=r"ends in '\.ts'; data files end in \.jsonl"):
        open_source(tmp_path / "x.ts")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("@\n@data\n1,2\n", r"x\.ts:1: @ is not a key of the \.ts format; remove the line"),
        ("@dimension ²\n@data\n1,2\n", r"x\.ts:1: @dimension is followed by ²; write a whole number"),
        ("@dimension " + "9" * 5000 + "\n@data\n1,2\n", r"x\.ts:1: @dimension is followed by 9+; write a whole number"),
        ("@a\0\n@data\n1,2\n", r"x\.ts:1: @a\\x00 is not a key"),
    ],
)
def test_a_header_line_that_is_none_is_refused_in_print(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        read(tmp_path, "x.ts", text)


def test_control_characters_of_a_column_are_escaped(tmp_path: Path) -> None:
    source = read(tmp_path, "x.csv", "\0eries,label\nx,a\n")
    assert all(reason.isprintable() for _, reason in reasons(source))
    assert source.bad_rows
