"""Files that are made to do harm, or that are no files: a sentence at once, in bounded time, room and memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.data.records import BadRecord
from dstrain.data.sources import files, parquet
from dstrain.data.sources import files as gzip_file
from dstrain.data.sources.open import open_source
from dstrain.data.vision.image_io import read_content, read_image
from dstrain.errors import DataError, RecipeError
from dstrain.files import display_path, open_regular_file

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


def test_every_path_has_a_name_for_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(loop(tmp_path, "a")) in ("a", "other")
    assert display_path(Path("a\0b")) == "a\0b"
    assert display_path(tmp_path / "sub/x") == "sub/x"
    assert display_path(Path("/etc/hosts")) == "/etc/hosts"


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


def test_a_file_that_became_a_fifo_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and its opening."""
    (tmp_path / "a.png").write_bytes(b"x")
    regular = os.stat(tmp_path / "a.png")
    (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    monkeypatch.setattr("dstrain.files.os.stat", lambda path: regular)
    with pytest.raises(OSError, match="is not a regular file"):
        open_regular_file(tmp_path / "a.png")


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
    monkeypatch.setattr(gzip_file.shutil, "disk_usage", lambda place: type("Usage", (), {"free": room}))
    packed = tmp_path / "bomb.jsonl.gz"
    with gzip.open(packed, "wb") as file:
        for _ in range(room >> 20):
            file.write(b" " * (1 << 20))
    wrote = 0
    write = gzip_file._SizeLimitedWriter.write

    def count(self: gzip_file._SizeLimitedWriter, piece: bytes) -> int:
        nonlocal wrote
        wrote += write(self, piece)
        return len(piece)

    monkeypatch.setattr(gzip_file._SizeLimitedWriter, "write", count)
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
            unittest.mock.patch("dstrain.data.vision.image_io.MAX_PIXELS", 1000),
            pytest.raises(BadRecord, match="pixels, more than the 1000 that are decoded"),
        ):
            read_image(bytes(content))


def test_an_image_is_read_as_before(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "link.png").symlink_to("a.png")
    assert read_content(tmp_path / "link.png")[0] == (tmp_path / "a.png").read_bytes()


def test_a_table_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary of one long value and a count of how often it stands there: 400 bytes for 80 GB."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pytest.importorskip("pyarrow.parquet")
    value = pyarrow.array(["0" * (1 << 20)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 400, pyarrow.int32()), value)
    path = tmp_path / "bomb.parquet"
    table.write_table(pyarrow.table({"text": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1000
    monkeypatch.setattr(parquet, "MAX_DECODE_BYTES", 256 << 20)
    with pytest.raises(DataError, match=r"a few of its rows take more than 256\.0 MiB of memory; write it again with"):
        open_source(path)
    monkeypatch.setattr(parquet, "MAX_DECODE_BYTES", 8 << 30)
    monkeypatch.setattr(parquet, "MAX_UNPACKED_BYTES", 100 << 20)
    with pytest.raises(DataError, match="it unpacks to more than 10000 times its size"):
        open_source(path)


def test_batches_in_memory_are_few_where_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, "MAX_CACHED_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 2)
    rows = [{"a": str(number) * 400_000} for number in range(8)]
    table.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert [source[at] for at in (0, 7, 3, 1)] == [rows[at] for at in (0, 7, 3, 1)]
    assert sum(batch.nbytes for _, batch in source._cached_batches) < 2 << 20  # type: ignore[attr-defined]
