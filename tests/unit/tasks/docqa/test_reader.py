from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dstrain.data.vision.images import read_image, resolve_image
from dstrain.errors import BadRecord
from dstrain.tasks.docqa.pages import Document, PdfDocument, TiffDocument
from dstrain.tasks.docqa.source import DocumentReader
from tests.unit.tasks.docqa.pdf_files import PAGES, write_pdf
from tests.vocabulary import invoke

COLORS = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an empty documents/ and a cache of its own."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents").mkdir()
    return tmp_path


@pytest.fixture
def watched() -> list[Path]:
    return []


@pytest.fixture
def reader(watched: list[Path]) -> DocumentReader:
    return DocumentReader(72, watched.append)


def page(color: tuple[int, int, int], size: tuple[int, int] = (20, 30)) -> Image.Image:
    return Image.new("RGB", size, color)


def write_tiff(path: Path) -> Path:
    first, *others = [page(color, (20 + at, 30)) for at, color in enumerate(COLORS)]
    first.save(path, save_all=True, append_images=others)
    return path


def colors_of(document: Document, folder: Path) -> list[Any]:
    values = [document.get_image(number) for number in range(1, document.num_pages + 1)]
    return [read_image(resolve_image(value, folder)).getpixel((5, 5)) for value in values]


def test_a_document_is_beside_the_data_file_or_in_its_folder_documents(folder: Path, reader: DocumentReader) -> None:
    for name in ("a.pdf", "documents/b.pdf", "documents/c.pdf"):
        write_pdf(folder / name)
    for value in ("a.pdf", "documents/b.pdf", "b.pdf", "c", str(folder / "a.pdf")):
        found = reader.open(value, folder)
        assert isinstance(found, PdfDocument)
        assert found.num_pages == len(PAGES)
    write_pdf(folder / "b.pdf", ["one page"])
    assert reader.open("b.pdf", folder).num_pages == 1, "the path comes before the name"


def test_a_name_without_its_suffix_has_to_be_the_only_one(folder: Path, reader: DocumentReader) -> None:
    write_pdf(folder / "documents" / "a.pdf")
    page(COLORS[0]).save(folder / "documents" / "a.png")
    with pytest.raises(BadRecord, match=r"'document' is 'a', which may be a.pdf and a.png"):
        reader.open("a", folder)


def test_a_kind_is_known_by_its_content(folder: Path, reader: DocumentReader) -> None:
    write_pdf(folder / "a.bin")
    (folder / "b.pdf").write_bytes(b"junk\n" + (folder / "a.bin").read_bytes())
    page(COLORS[1]).save(folder / "c.pdf", "PNG")
    assert reader.open("a.bin", folder).num_pages == len(PAGES)
    assert isinstance(reader.open("b.pdf", folder), PdfDocument)
    assert colors_of(reader.open("c.pdf", folder), folder) == [COLORS[1]]


def test_page_images_of_a_folder_are_in_natural_order(folder: Path, reader: DocumentReader) -> None:
    scans = folder / "documents" / "scans"
    scans.mkdir()
    for name, color in zip(("page10.PNG", "page2.png", "page1.png"), COLORS, strict=True):
        page(color).save(scans / name, "PNG")
    for name in ("page1.txt", ".hidden.png", "notes.md"):
        (scans / name).write_text("the text of a page")
    found = reader.open("scans", folder)
    assert colors_of(found, folder) == [COLORS[2], COLORS[1], COLORS[0]]
    assert found.read_texts() == ["the text of a page", "", ""]


def test_a_tiff_has_a_page_per_frame_and_form_feeds_in_its_text(folder: Path, reader: DocumentReader) -> None:
    write_tiff(folder / "a.tif")
    found = reader.open("a.tif", folder)
    assert isinstance(found, TiffDocument)
    assert colors_of(found, folder) == COLORS
    assert [read_image(resolve_image(found.get_image(at), folder)).size for at in (1, 2, 3)] == [
        (20, 30),
        (21, 30),
        (22, 30),
    ]
    assert found.read_texts() == ["", "", ""]
    (folder / "a.txt").write_text("one\ftwo")
    assert found.read_texts() == ["one", "two", ""]


def test_a_tiff_under_image_has_its_pages_too(folder: Path, reader: DocumentReader, watched: list[Path]) -> None:
    write_tiff(folder / "a.tif")
    assert colors_of(reader.open_images(["a.tif"], folder), folder) == COLORS
    assert folder / "a.tif" in watched
    assert reader.open_images(["gone.tif"], folder).num_pages == 1, "reported when the image is read"


def test_images_of_a_record_are_its_pages(folder: Path, reader: DocumentReader) -> None:
    for name, color in zip(("a.png", "b.png"), COLORS, strict=False):
        page(color).save(folder / name)
    (folder / "b.csv").write_text("1,2,3,4,5,6,7,8,text of b\n")
    found = reader.open_images(["a.png", {"bytes": (folder / "b.png").read_bytes()}, {"path": "b.png"}], folder)
    assert colors_of(found, folder) == [COLORS[0], COLORS[1], COLORS[1]]
    assert found.read_texts() == ["", "", "text of b"]
    with pytest.raises(BadRecord, match=r"an image is a number, not the path"):
        reader.open_images([5], folder)


def write(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("value", "make", "reason"),
    [
        ("gone.pdf", None, r"document not found: gone.pdf \(looked in \. and its folder documents\); check the path"),
        ("https://a.org/b.pdf", None, r"'document' is the URL https://a.org/b.pdf; download it first"),
        ("a\0b.pdf", None, r"document not found"),
        ("a" * 300, None, r"document not found"),
        (
            "a.docx",
            write("a.docx", b"PK\x03\x04rest"),
            r"a.docx is not a document of a known kind \(it is a zip archive",
        ),
        ("a.pdf", write("a.pdf", b"<html>404</html>"), r"a.pdf is not a document of a known kind \(it is HTML"),
        ("a.txt", write("a.txt", b"a plain text"), r"a.txt is not a document of a known kind \(it is text"),
        ("a.pdf", write("a.pdf", b""), r"a.pdf is empty; download it again"),
        ("a.pdf", lambda folder: os.mkfifo(folder / "a.pdf"), r"a.pdf is not a regular file"),
        ("documents", None, r"the folder documents has no page images"),
    ],
)
def test_what_is_not_a_document_is_refused_with_the_fix(
    folder: Path, reader: DocumentReader, value: str, make: Any, reason: str
) -> None:
    if make is not None:
        make(folder)
    with pytest.raises(BadRecord, match=reason):
        reader.open(value, folder)


def test_a_damaged_image_is_found_when_it_is_read(folder: Path, reader: DocumentReader) -> None:
    write_tiff(folder / "a.tif")
    (folder / "b.tif").write_bytes((folder / "a.tif").read_bytes()[:-1500])
    (folder / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n cut")
    for value, reason in (("b.tif", r"b.tif is damaged or truncated"), ("c.png", r"c.png is damaged or truncated")):
        with pytest.raises(BadRecord, match=reason):
            colors_of(reader.open(value, folder), folder)


def test_every_file_that_a_document_depends_on_is_watched(
    folder: Path, reader: DocumentReader, watched: list[Path]
) -> None:
    scans = folder / "documents" / "scans"
    scans.mkdir()
    for at, color in enumerate(COLORS):
        page(color).save(scans / f"{at}.png")
    reader.open("scans", folder)
    assert {folder / "scans", scans, scans / "0.txt", scans / "2.csv"} <= {*watched}, "present or not"
    with pytest.raises(BadRecord):
        reader.open("gone.pdf", folder)
    assert {folder / "gone.pdf", folder / "documents" / "gone.pdf"} <= {*watched}


@pytest.mark.parametrize("record", [{"document": "page.png"}, {"document": "../out/page.png"}, {"image": "page.png"}])
def test_a_data_file_with_a_relative_path_finds_its_pages(
    record: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "page.png")
    (tmp_path / "in/data.jsonl").write_text(json.dumps({**record, "question": "What?", "answer": "It."}))
    monkeypatch.chdir(tmp_path)
    result = invoke("data", "check", "in/data.jsonl", "--task", "docqa")
    assert result.exit_code == 0, result.output
