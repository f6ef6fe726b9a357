from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dstrain.data.documents import pages
from dstrain.data.limited_process import ResourceLimits
from dstrain.data.records import BadRecord
from dstrain.errors import DataError
from tests.unit.data.documents.pdf_files import PAGES, write_empty_pdf, write_objects, write_one_page, write_pdf

LINES = b"0 0 m 90 70 l S 3 3 40 40 re f\n"


def test_a_pdf_has_pages_texts_and_images(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    assert pages.count_pages(path) == len(PAGES)
    pages.write_texts(path, tmp_path / "text.json")
    assert json.loads((tmp_path / "text.json").read_text()) == [*PAGES]
    pages.render_page(path, tmp_path / "2.png", 2, 144)
    page = Image.open(tmp_path / "2.png")
    assert (page.size, page.mode) == ((400, 200), "RGB"), "200 x 100 points at 144 dpi"
    assert np.asarray(page).min() < 100 < np.asarray(page).mean()
    assert [file.name for file in tmp_path.glob("*.partial")] == []


def test_a_page_with_the_same_bytes_gives_the_same_image(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    for name in ("1.png", "2.png"):
        pages.render_page(path, tmp_path / name, 1, 100)
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()


def truncated(path: Path) -> Path:
    whole = write_pdf(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path


def garbled(path: Path) -> Path:
    path.write_bytes(b"%PDF-1.7\n" + b"\0\1\2" * 500 + b"\n%%EOF")
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: write_pdf(path, password="user"), r"a.pdf is encrypted with a password; save it without one"),
        (truncated, r"a.pdf is truncated: it has no %%EOF at its end; download it again"),
        (garbled, r"a.pdf is a damaged PDF .*; download it again"),
        (write_empty_pdf, r"a.pdf has no pages; replace it, or remove the record"),
    ],
    ids=["encrypted", "truncated", "garbled", "no pages"],
)
def test_a_pdf_that_cannot_be_opened_is_refused_with_the_reason(tmp_path: Path, make: Any, reason: str) -> None:
    path = make(tmp_path / "a.pdf")
    for call in (
        lambda: pages.count_pages(path),
        lambda: pages.write_texts(path, tmp_path / "text.json"),
        lambda: pages.render_page(path, tmp_path / "1.png", 1, 144),
    ):
        with pytest.raises(BadRecord, match=reason):
            call()


def test_a_pdf_that_only_its_owner_may_change_is_read(tmp_path: Path) -> None:
    import fpdf

    pdf = fpdf.FPDF()
    pdf.add_page()
    pdf.set_encryption(owner_password="owner", permissions=fpdf.enums.AccessPermission.none())
    pdf.output(str(tmp_path / "a.pdf"))
    assert pages.count_pages(tmp_path / "a.pdf") == 1


def test_a_page_that_is_damaged_is_refused_when_it_is_rendered(tmp_path: Path) -> None:
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[9 0 R]/Count 1>>"]
    path = write_objects(tmp_path / "a.pdf", objects)
    assert pages.count_pages(path) == 1
    pages.write_texts(path, tmp_path / "text.json")
    assert json.loads((tmp_path / "text.json").read_text()) == [""]
    with pytest.raises(BadRecord, match=r"page 1 of .*a.pdf is damaged and cannot be rendered"):
        pages.render_page(path, tmp_path / "1.png", 1, 144)


def test_a_large_page_is_rendered_at_a_lower_resolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_one_page(tmp_path / "a.pdf", b"0 0 2000 1000")
    monkeypatch.setattr(pages, "MAX_PAGE_PIXELS", 20_000)
    pages.render_page(path, tmp_path / "1.png", 1, 144)
    assert Image.open(tmp_path / "1.png").size == (200, 100)


def test_a_page_has_a_bounded_number_of_pixels_whatever_its_size_and_dpi() -> None:
    for width, height in ((612, 792), (14400, 14400), (1e-3, 1e9), (1e9, 1e9), (3, 2e7)):
        scale = pages.page_scale(width, height, 1200)
        if scale is not None:
            assert width * scale * height * scale <= pages.MAX_PAGE_PIXELS * 1.001
    assert pages.page_scale(612, 792, 144) == 2
    for width, height in ((0, 10), (-1, -1), (float("inf"), 1), (float("nan"), 1), (1e-200, 1e-200), (0.01, 1e6)):
        assert pages.page_scale(width, height, 144) is None


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ResourceLimits(2 << 30, cpu_seconds=1, wall_seconds=60), r"takes more than 1 seconds of processor time"),
        (ResourceLimits(2 << 30, wall_seconds=0.2), r"takes more than 2.0 GiB of memory or 0.2 seconds, or crashes"),
        (ResourceLimits(64 << 20, wall_seconds=60), r"takes more than 64.0 MiB of memory"),
    ],
    ids=["processor time", "time", "memory"],
)
def test_a_page_that_takes_too_much_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: ResourceLimits, reason: str
) -> None:
    path = write_one_page(tmp_path / "a.pdf", content=LINES * 400_000)
    monkeypatch.setattr(pages, "LIMITS", limits)
    with pytest.raises(BadRecord, match=rf"rendering page 1 {reason}"):
        pages.render_page(path, tmp_path / "1.png", 1, 144)
    assert not (tmp_path / "1.png").exists()


def test_only_so_much_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    monkeypatch.setattr(pages, "MAX_PAGE_CHARS", 9)
    monkeypatch.setattr(pages, "MAX_DOCUMENT_CHARS", 20)
    pages.write_texts(path, tmp_path / "text.json")
    assert json.loads((tmp_path / "text.json").read_text()) == ["the lease", "the rent ", "pe", "", ""]


def test_a_full_disk_is_not_the_documents_fault(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    with pytest.raises(DataError, match=r"cannot be written into the cache.*set DSTRAIN_CACHE to another"):
        pages.render_page(path, tmp_path / "gone" / "1.png", 1, 144)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = write_pdf(tmp_path / "a.pdf"), builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pypdfium2"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"a.pdf is a PDF and needs .*; run pip install \"dstrain\[docqa\]\""):
        pages.count_pages(path)
