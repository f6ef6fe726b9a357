"""Files that were cut, and files that are something else than their name says: nothing is read of them in silence."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dstrain.commands.data import check_file
from dstrain.data.prepare import describe_conversions
from dstrain.data.sources.open import open_source
from dstrain.data.vision.images import IMAGE_FORMATS, read_image, resolve_image
from dstrain.errors import BadRecord, DataError
from dstrain.tasks.docqa.source import DocumentOptions, DocumentSource
from dstrain.tasks.temporal.tables import open_series
from tests.unit.tasks.docqa.pdf_files import write_pdf
from tests.vocabulary import write_jsonl

Image = pytest.importorskip("PIL.Image")

RECORDS = [{"id": str(at), "text": f"text number {at}", "series": [at, 1, 2, 3]} for at in range(40)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
TABLE = "t0,t1,label\n" + "".join(f"{at % 7}.25,{at % 5}.5,up\n" for at in range(40))
TS = "@seriesLength 2\n@classLabel true up down\n@data\n" + "".join(f"{at}.25,{at}.5:down\n" for at in range(40))


def make_parquet() -> bytes:
    file, parquet = io.BytesIO(), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(RECORDS), file)
    return file.getvalue()


WHOLE: dict[str, Callable[[], bytes]] = {
    ".jsonl": lambda: LINES,
    ".json": lambda: json.dumps(RECORDS).encode(),
    ".jsonl.gz": lambda: gzip.compress(LINES),
    ".json.gz": lambda: gzip.compress(json.dumps(RECORDS).encode()),
    ".csv": TABLE.encode,
    ".csv.gz": lambda: gzip.compress(TABLE.encode()),
    ".ts": TS.encode,
    ".parquet": make_parquet,
}


@pytest.mark.parametrize("ending", WHOLE)
@pytest.mark.parametrize("rest", [0.3, 0.9, -9, -4])
def test_a_data_file_that_was_cut_is_not_taken_for_a_shorter_one(ending: str, rest: float, tmp_path: Path) -> None:
    content, path = WHOLE[ending](), tmp_path / f"x{ending}"
    path.write_bytes(content)
    assert len(open_series(path)) == 40
    count = int(len(content) * rest) if rest > 0 else len(content) + int(rest)
    if content[:count].endswith(b"\n") or re.search(rb",(?:u|up)$", content[:count]):
        count -= 5 if ending == ".csv" else 3  # a cut between rows, or in the last cell, shows in no text file
    cut = tmp_path / f"cut{ending}"
    cut.write_bytes(content[:count])
    if ending in (".jsonl", ".csv", ".ts"):  # the rows before the cut are there
        assert len(open_series(cut).bad_rows) == 1
    else:
        assert f"cut{ending}" in refuse(cut)


def make_image(form: str) -> bytes:
    file, noise = io.BytesIO(), np.random.RandomState(0).randint(0, 255, (64, 80, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    settings = {"sizes": [(64, 48)]} if form == "ICO" else {}
    (image.convert("P") if form == "GIF" else image).save(file, form, **settings)
    return file.getvalue()


@pytest.mark.parametrize("form", [form for form in IMAGE_FORMATS if form not in ("DIB", "MPO")])
@pytest.mark.parametrize("rest", [0.5, 0.9, -100])
def test_an_image_that_was_cut_is_refused(form: str, rest: float) -> None:
    Image.init()
    if form not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {form}")
    content = make_image(form)
    read_image(content)
    count = int(len(content) * rest) if rest > 0 else len(content) + int(rest)
    with pytest.raises(BadRecord, match=r"damaged or truncated"):
        read_image(content[:count])


@pytest.mark.parametrize("rest", [0.3, 0.9, 0.99])
def test_a_pdf_that_was_cut_is_refused(rest: float, tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    content = write_pdf(tmp_path / "a.pdf").read_bytes()
    (tmp_path / "cut.pdf").write_bytes(content[: int(len(content) * rest)])
    path = write_jsonl(tmp_path / "x.jsonl", [{"document": "cut.pdf", "question": "What?", "answer": "this"}])
    with pytest.raises(BadRecord, match=r"cut\.pdf is truncated: it has no %%EOF at its end; download it again"):
        DocumentSource(open_source(path), DocumentOptions())[0]


def refuse(path: Path) -> str:
    with pytest.raises(DataError) as refused:
        open_series(path)
    return str(refused.value)


def run_command(message: str, folder: Path) -> None:
    """Run the command at the end of a message."""
    command = message[message.rindex(": ") + 2 :] if "python -c" not in message else message[message.index("python") :]
    folder_of_python = folder / "bin"
    folder_of_python.mkdir()
    (folder_of_python / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{folder_of_python}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", command], check=True, cwd=folder, env=environment, timeout=60)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".ts"])
def test_packed_data_without_the_suffix_is_named(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"x{ending}").write_bytes(gzip.compress(WHOLE[ending]()))
    message = refuse(tmp_path / f"x{ending}")
    assert "is packed with gzip; rename it: " in message
    run_command(message, tmp_path)
    assert len(open_series(tmp_path / f"x{ending}.gz")) == 40


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".ts"])
def test_plain_data_with_the_suffix_is_named(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"x{ending}.gz").write_bytes(WHOLE[ending]())
    message = refuse(tmp_path / f"x{ending}.gz")
    assert "is not packed: it is no gzip file, although its name ends in .gz" in message
    run_command(message, tmp_path)
    assert len(open_series(tmp_path / f"x{ending}")) == 40


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04....", "is a zip archive; unpack it"),
        (b"\x28\xb5\x2f\xfd....", r"is packed with zstd"),
        (b"BZh9....", "is packed with bzip2"),
        (b"\xfd7zXZ\0", "is packed with xz"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer; `git lfs pull` fetches the file"),
        (b"\n<!DOCTYPE html>", "is HTML, such as an error page; download it again"),
        (b"PAR1....", r"is a parquet file; name it \.parquet"),
    ],
)
def test_other_data_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        open_source(tmp_path / "x.jsonl")


def test_json_in_a_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(LINES)
    assert "is JSON text, not a parquet file; name it .jsonl" in refuse(tmp_path / "x.parquet")


def test_objects_over_several_lines_are_one_error_with_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [{"text": "a } {\n b", "list": [{"x": 1}, {}]}, {"text": "ä"}, {"text": "c"}]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(record, indent=2) for record in records) + "\n")
    message = refuse(tmp_path / "x.jsonl")
    assert "has JSON over several lines, and a record of .jsonl is one line" in message
    run_command(message, tmp_path)
    source = open_source(tmp_path / "lines-x.jsonl")
    assert [dict(source[index]) for index in range(len(source))] == records
    (tmp_path / "y.jsonl").write_text(json.dumps({"data": records}, indent=2))
    assert "is one JSON object with a list under 'data'; name it .json" in refuse(tmp_path / "y.jsonl")


def test_one_bad_line_is_no_object_over_several_lines(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": \n' + LINES)
    found = open_source(tmp_path / "x.jsonl")
    assert (len(found), len(found.bad_rows)) == (40, 1)


FOREIGN_IMAGES = {
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", r"it is HEIC, as of an iPhone; known: .*`heif-convert IN\.heic"),
    "HEIF": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", r"it is HEIC"),
    "MP4": (b"\0\0\0\x18ftypisom\0\0\0\0isom", r"it is a video or sound \(MP4\)"),
    "PCX": (b"\x0a\x05\x01\x08" + bytes(124), r"it is PCX; known: .*; save it as PNG or JPEG"),
    "TGA": (bytes(18 + 12) + bytes(8) + b"TRUEVISION-XFILE.\0", r"it is TGA"),
    "DDS": (b"DDS " + bytes(124), r"it is a DDS texture"),
    "DICOM": (bytes(128) + b"DICM", r"it is DICOM"),
    "PSD": (b"8BPS" + bytes(22), r"it is a Photoshop file"),
    "JPEG XL": (b"\xff\x0a" + bytes(30), r"it is JPEG XL"),
    "doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), r"it is a \.doc, \.xls or \.ppt file of Office"),
}


@pytest.mark.parametrize("name", FOREIGN_IMAGES)
def test_formats_that_are_not_decoded_are_named(name: str) -> None:
    content, reason = FOREIGN_IMAGES[name]
    with pytest.raises(BadRecord, match=reason):
        read_image(content)


def test_a_word_document_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "a.doc").write_bytes(FOREIGN_IMAGES["doc"][0])
    path = write_jsonl(tmp_path / "x.jsonl", [{"document": "a.doc", "question": "What?", "answer": "this"}])
    with pytest.raises(
        BadRecord, match=r"a\.doc is not a document of a known kind \(it is a \.doc.*; save it as a PDF"
    ):
        DocumentSource(open_source(path), DocumentOptions())[0]


def test_files_of_a_folder_of_pages_that_are_not_read_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "scan"
    folder.mkdir()
    for name in ("page1.png", "page2.PNG"):
        Image.new("RGB", (8, 8)).save(folder / name)
    for name in ("page1.txt", "extra.pdf", "b.docx", "notes.txt", ".hidden"):
        (folder / name).write_bytes(b"x")
    path = write_jsonl(tmp_path / "x.jsonl", [{"document": "scan", "question": "What?", "answer": "this"}] * 2)
    source = DocumentSource(open_source(path), DocumentOptions())
    assert [source[index]["pages"] for index in range(2)] == [[1, 2]] * 2
    assert source.summarize()[-1] == f"{folder}: 3 files not read: .docx 1, .pdf 1, .txt 1"


def test_a_broken_link_is_named_as_the_data_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "broken.png").symlink_to("nowhere")
    reason = r"image not found: img/broken\.png is a link to nowhere, which does not exist; correct the link"
    with pytest.raises(BadRecord, match=reason):
        read_image(tmp_path / "img" / "broken.png")


def test_an_import_of_pillow_in_another_thread_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is in sys.modules before its classes are, and a list in a list is asked whether it is an image."""
    monkeypatch.setitem(sys.modules, "PIL.Image", ModuleType("PIL.Image"))
    with pytest.raises(BadRecord, match=r"an image is a list, not the path of a file|an image is an array"):
        resolve_image(["im/0.png"], Path())


def test_pillow_prints_no_warning_of_its_own(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("default")
    Image.new("L", (30_000, 3_000)).save(tmp_path / "wide.png", compress_level=1)
    with pytest.raises(BadRecord, match=r"has 90000000 pixels, more than the 89478485"):
        read_image(tmp_path / "wide.png")
    # Files that earlier tests left open are warned of whenever they are collected.
    assert not [warning for warning in recwarn if "PIL" in warning.filename or "Image" in str(warning.message)]


def make_grey(most: int) -> bytes:
    file, values = io.BytesIO(), np.linspace(0, most, 64 * 48).reshape(48, 64)
    Image.fromarray(values.astype(np.uint16)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(("most", "share"), [(4095, "6%"), (16383, "25%"), (65535, None)])
def test_few_bits_in_sixteen_are_noted(most: int, share: str | None) -> None:
    notes = describe_conversions(make_grey(most))
    assert "16 bits per channel: it is scaled to 8" in notes
    assert [note for note in notes if note.startswith(f"its brightest value is {share} of white")] == notes[1:]


def make_planar_tiff() -> bytes:
    """Return a valid TIFF of 4x3 pixels with three planes of 64-bit floats, which Pillow does not read."""
    planes = np.arange(36, dtype="<f8").tobytes()
    tags = [
        (256, 3, 1, 4), (257, 3, 1, 3), (258, 3, 3, 64), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 3, 0), (277, 3, 1, 3),
        (278, 3, 1, 3), (279, 4, 3, 0), (284, 3, 1, 2), (339, 3, 3, 3),
    ]  # fmt: skip
    start = 8 + 2 + 12 * len(tags) + 4
    extra, entries = b"", b""
    for tag, kind, count, value in tags:
        if count == 1:
            entries += struct.pack("<HHII", tag, kind, count, value)
            continue
        entries += struct.pack("<HHII", tag, kind, count, start + len(extra))
        values = {273: [1000 + 96 * at for at in range(3)], 279: [96] * 3}.get(tag, [value] * 3)
        extra += struct.pack("<3I" if kind == 4 else "<3H", *values)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + struct.pack("<I", 0) + extra
    return head.ljust(1000, b"\0") + planes


def test_a_valid_tiff_that_pillow_does_not_read_is_not_called_damaged() -> None:
    reason = r"variant that Pillow does not read \(TIFF of 4x3 pixels with floats of 64 bits, each channel in a plane"
    with pytest.raises(BadRecord, match=reason):
        read_image(make_planar_tiff())
    with pytest.raises(BadRecord, match=r"damaged or truncated in its first bytes; download it again"):
        read_image(make_planar_tiff()[:40])


def test_a_nested_list_of_images_is_a_bad_record(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    records: list[dict[str, Any]] = [{"image": "0.png", "question": "q", "answer": "a"}] * 3
    records.append({"images": [["0.png"]], "question": "<image>q", "answer": "a"})
    path = write_jsonl(tmp_path / "x.jsonl", records)
    (bad,) = check_file(str(path), "vlm", [])[0].bad
    assert bad.location == f"{path}:4"
