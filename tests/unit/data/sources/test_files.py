"""Files that are made to do harm, or that are no files: a sentence at once, in bounded time, room and memory."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.data.prepare import group_by_reason
from dstrain.data.sources import files
from dstrain.data.sources.base import Source
from dstrain.data.sources.open import open_source
from dstrain.data.vision.images import read_image
from dstrain.errors import BadRecord, DataError, RecipeError
from dstrain.tasks.temporal.tables import open_series

RECORD = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A thing."}]}


def loop(folder: Path, name: str) -> Path:
    (folder / "other").symlink_to(name)
    (folder / name).symlink_to("other")
    return folder / name


def test_a_loop_of_links_as_an_image_is_a_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop(tmp_path, "a.png")
    with pytest.raises(BadRecord, match=r"a\.png cannot be read \(Too many levels of symbolic links\); check"):
        read_image(tmp_path / "a.png")
    Path("d.jsonl").write_text(json.dumps(RECORD | {"image": "a.png"}) + "\n")
    said = CliRunner().invoke(main, ["data", "check", "d.jsonl", "--task", "vlm"])
    assert said.exit_code == 2
    assert "d.jsonl:1: " in said.output
    assert "Too many levels" in said.output


@pytest.mark.parametrize("name", ["fifo", "/dev/zero", "/dev/null", "/proc/kmsg", "/proc/self/mem", "empty.png"])
def test_nothing_but_a_file_with_bytes_is_read_as_an_image(name: str, tmp_path: Path) -> None:
    """/proc/kmsg is a regular file without a size, and reading from it never ends."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty.png").touch()
    told: list[str] = []

    def read() -> None:
        try:
            read_image(tmp_path / name)
        except BadRecord as fault:
            told.append(str(fault))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(10)
    assert told, "it hangs"
    assert any(word in told[0] for word in ("is not a regular file", "is empty", "Permission denied", "not permitted"))


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (b"root:*:20228:0:99999:7:::\n", "it is text"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n", "it is text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer, `git lfs pull`"),
        (b"\xef\xbb\xbf<!DOCTYPE html>", "it is HTML, SVG or XML"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "it is PostScript"),
        (b"icns\x00\x00\x01\x00", "it is an Apple icon"),
        (b"\x7fELF\x02\x01", "its first bytes are unknown"),
    ],
)
def test_messages_hold_nothing_of_a_file_that_is_no_image(content: bytes, looks: str) -> None:
    with pytest.raises(BadRecord, match="is not an image in a known format") as said:
        read_image(content)
    assert looks in str(said.value)
    assert not any(secret in str(said.value) for secret in ("root", "OPENSSH", "DOCTYPE", "ELF"))


def test_a_packed_file_fills_no_more_than_its_share_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 64 << 20
    monkeypatch.setattr(files.shutil, "disk_usage", lambda place: type("Usage", (), {"free": room}))
    packed = tmp_path / "bomb.jsonl.gz"
    with gzip.open(packed, "wb") as file:
        for _ in range(room >> 20):
            file.write(b" " * (1 << 20))
    wrote = 0
    write = files._SizeLimitedWriter.write

    def count(self: files._SizeLimitedWriter, piece: bytes) -> int:
        nonlocal wrote
        wrote += write(self, piece)
        return len(piece)

    monkeypatch.setattr(files._SizeLimitedWriter, "write", count)
    with pytest.raises(DataError, match=r"unpacks to more than 32\.0 MiB, half of the free space in .*; set TMPDIR"):
        open_source(packed)
    assert wrote <= room // 2


def test_a_line_without_end_is_one_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    lines = [
        b'{"a": 1}\n',
        b'{"a": "' + b"x" * 1000 + b'"}\n',
        b'{"a": 2}\n',
        b"\n",
        b'{"a": 3}' + b" " * 91 + b"\n",
        b"y" * 101,
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    source = open_source(tmp_path / "a.jsonl")
    assert [source[at] for at in range(len(source))] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [source.location(at).rpartition(":")[2] for at in range(len(source))] == ["1", "3", "5"]
    assert [row.location.rpartition(":")[2] for row in source.bad_rows] == ["2", "6"]
    assert source.bad_rows[0].reason.startswith("has 1010 B, and a line has ")
    import hashlib

    assert source.digest == hashlib.sha256(b"".join(lines)).hexdigest()


def test_a_list_that_would_not_fit_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"a": "x" * 1000}]))
    monkeypatch.setattr(files.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2000}))
    with pytest.raises(DataError, match=r"is read into memory, of which 2\.0 KiB are free; write one record per"):
        open_source(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/null"), "is not a regular file"),
        (lambda path: path.symlink_to(path.name), "is a link that points to itself"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, which does not exist"),
    ],
)
def test_what_is_there_and_is_no_file_is_called_that(make, why, tmp_path, monkeypatch):
    from dstrain.commands.recipe_args import TrainRequest, resolve_recipe

    monkeypatch.chdir(tmp_path)
    make(Path("x.jsonl"))
    with pytest.raises(DataError, match=f"x.jsonl {why}"):
        open_source("x.jsonl")
    if "link" in why:  # what exists is opened where the data are read
        with pytest.raises(RecipeError, match=f"x.jsonl: {why}"):
            resolve_recipe(TrainRequest(task="rm", overrides=["model.path=.", "data.train=x.jsonl"]))


def test_a_loop_as_the_run_folder_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop(tmp_path, "run")
    said = CliRunner().invoke(main, ["train", "demo-rm", "--num-gpus", "2", "--run-dir", "run"])
    assert said.exit_code == 2, said.output
    assert "cannot be read (Too many levels of symbolic links)" in said.output


@pytest.mark.parametrize(
    "key", ["model.path", "model.tokenizer", "model.init", "model.chat_template", "task", "ds_config"]
)
def test_a_loop_under_any_path_is_a_sentence(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop(tmp_path, "a.json" if key == "ds_config" else "a.py" if key == "task" else "a")
    Path("x.jsonl").write_text("{}\n")
    name = "./a.json" if key == "ds_config" else "./a.py" if key == "task" else "./a"
    words = ["train", "--task", "rm", "--set", "model.path=.", "--set", "data.train=x.jsonl", "--set", f"{key}={name}"]
    words = words[:1] + words[3:] if key == "task" else words
    said = CliRunner().invoke(main, [*words, "--dry-run"])
    assert said.exception is None or isinstance(said.exception, SystemExit), said.exception


@pytest.mark.parametrize("form", ["EPS", "ICNS", "PDF", "TGA", "PSD"])
def test_formats_that_run_programs_or_hold_many_sizes_are_not_decoded(form: str, tmp_path: Path) -> None:
    from PIL import Image

    image, file = Image.new("RGB", (64, 64)), io.BytesIO()
    if form == "PSD":
        file.write(b"8BPS" + b"\0" * 60)
    else:
        image.save(file, form)
    with pytest.raises(BadRecord, match="is not an image in a known format"):
        read_image(file.getvalue())


@pytest.mark.parametrize("form", ["GIF", "TIFF", "ICO", "WEBP", "BMP", "JPEG2000"])
def test_an_image_that_claims_to_be_huge_is_refused_before_it_is_decoded(form: str) -> None:
    """By its header: each of them names its size there."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (200, 200)).save(file, form)
    content = bytearray(file.getvalue())
    sizes = {"GIF": [(6, 2), (8, 2)], "BMP": [(18, 4), (22, 4)]}
    if form in sizes:
        for at, width in sizes[form]:
            content[at : at + width] = (60_000).to_bytes(width, "little")
        with pytest.raises(BadRecord, match="has 3600000000 pixels, more than the 89478485 that are decoded"):
            read_image(bytes(content))
    else:
        import unittest.mock

        with (
            unittest.mock.patch("dstrain.data.vision.images.MAX_PIXELS", 1000),
            pytest.raises(BadRecord, match="pixels, more than the 1000 that are decoded"),
        ):
            read_image(bytes(content))


# Files of series: .ts and .csv are read strictly, and every fault has its line.


HEADER = (
    "#about\n@problemName P\n@timeStamps false\n@missing true\n@univariate false\n@dimension 2\n@classLabel true a b\n"
)


def read(folder: Path, name: str, text: str) -> Source:
    (folder / name).write_text(text)
    return open_series(folder / name)


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
    source = open_series(tmp_path / "x.csv", {"class": "label"})
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
        ("# made by hand\nt0,t1\n1,2\n", "x.csv:1: the first line is a comment; remove the line"),
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
    source = open_series(tmp_path / "x.csv", {"index": None})
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


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_OPEN_SOURCES", len(files._open_sources))
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    before = len(os.listdir("/proc/self/fd"))
    source = files.JsonLinesSource(path, {})
    assert len(os.listdir("/proc/self/fd")) == before
    assert [source[index] for index in (1, 0)] == [{"a": 2}, {"a": 1}]
    path.write_text('{"a": 3}\n{"a": 4}\n')
    os.utime(path, (1, 1))
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: the file was changed while it was in use \(it was written again\)"
    ):
        source[0]
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        source[0]
