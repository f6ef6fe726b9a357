from __future__ import annotations

import builtins
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dstrain.data.limited_process import ResourceLimits
from dstrain.data.vision.images import read_image
from dstrain.errors import BadRecord, DataError
from dstrain.tasks.docqa import pages
from dstrain.tasks.docqa.pages import DocumentCache, PageIndex, PdfDocument, read_boxes, read_sidecar, tokenize_words
from tests.unit.tasks.docqa.pdf_files import (
    PAGES,
    count_calls,
    write_empty_pdf,
    write_objects,
    write_one_page,
    write_pdf,
)

LINES = b"0 0 m 90 70 l S 3 3 40 40 re f\n"


def test_a_pdf_has_pages_texts_and_images(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    assert pages.count_pages(path) == len(PAGES)
    assert pages.read_texts(path) == [*PAGES]
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
        lambda: pages.read_texts(path),
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
    assert pages.read_texts(path) == [""]
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


@pytest.mark.slow
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
    assert pages.read_texts(path) == ["the lease", "the rent ", "pe", "", ""]


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


pytestmark = pytest.mark.usefixtures("fresh_cache")


def open_pdf(path: Path, dpi: int = 72) -> PdfDocument:
    return PdfDocument(path, path.name, dpi)


def test_opening_a_document_renders_nothing_and_reads_no_text(tmp_path: Path, fresh_cache: Path) -> None:
    found = open_pdf(write_pdf(tmp_path / "a.pdf"))
    assert found.num_pages == len(PAGES)
    assert [file.name for file in fresh_cache.rglob("p*") if file.is_file()] == ["pages.json"]


def test_a_page_is_rendered_once_and_only_if_it_is_used(
    tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    calls = count_calls(monkeypatch, pages, "call_pdfium")
    found = open_pdf(path)
    file = found.get_image(3).get_file()
    assert read_image(file).size == (200, 100)
    assert found.read_texts() == [*PAGES]
    assert [operation for _, _, operation in calls] == ["opening it", "rendering page 3", "reading its text"]
    again = open_pdf(path)
    assert again.get_image(3).get_file() == file
    assert again.read_texts() == [*PAGES]
    assert len(calls) == 3, "all of it is in the cache"
    assert [file.name for file in fresh_cache.rglob("*.png")] == ["00003.png"]


def test_pages_are_kept_by_content_resolution_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = write_pdf(tmp_path / "a.pdf"), write_pdf(tmp_path / "b.pdf", ["another"])
    (tmp_path / "c.pdf").write_bytes(first.read_bytes())
    file = open_pdf(first).get_image(1).get_file()
    assert open_pdf(tmp_path / "c.pdf").get_image(1).get_file() == file
    assert open_pdf(other).get_image(1).get_file() != file
    assert open_pdf(first, 100).get_image(1).get_file() != file
    monkeypatch.setattr(pages, "installed_version", lambda package: "5.99")
    assert open_pdf(first).get_image(1).get_file() != file


def test_threads_wait_for_the_one_that_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_pdf(write_pdf(tmp_path / "a.pdf"))
    calls = count_calls(monkeypatch, pages, "call_pdfium")
    with ThreadPoolExecutor(8) as pool:
        files = [*pool.map(lambda page: found.get_image(page % 3 + 1).get_file(), range(24))]
    assert len(calls) == len(set(files)) == 3


def _read_all(path: Path, results: multiprocessing.Queue) -> None:
    found = open_pdf(path)
    results.put([found.get_image(page).get_file().read_bytes() for page in range(1, found.num_pages + 1)])


def test_two_processes_at_once_read_the_same_pages(tmp_path: Path, fresh_cache: Path) -> None:
    path, context = write_pdf(tmp_path / "a.pdf"), multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_read_all, args=(path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = results.get(timeout=120), results.get(timeout=120)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert first == second
    assert len(set(first)) == len(PAGES)
    assert [*fresh_cache.rglob("*.partial")] == []


def test_a_page_that_failed_is_not_tried_again_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_one_page(tmp_path / "a.pdf", b"0 0 1e-9 1e30")
    found = open_pdf(path)
    calls = count_calls(monkeypatch, pages, "call_pdfium")
    for _ in range(3):
        monkeypatch.setattr(pages, "page_scale", lambda *size: None)
        with pytest.raises(BadRecord, match=r"page 1 of .*a.pdf has no area"):
            found.get_image(1).get_file()
    assert len(calls) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_not_writable_is_named(tmp_path: Path, fresh_cache: Path) -> None:
    fresh_cache.mkdir()
    fresh_cache.chmod(0o500)
    with pytest.raises(DataError, match=r"cannot be written into the cache"):
        open_pdf(write_pdf(tmp_path / "a.pdf"))


def test_a_cache_below_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pdf(tmp_path / "a.pdf")
    monkeypatch.setenv("DSTRAIN_CACHE", str(path / "cache"))
    with pytest.raises(DataError, match=r"cannot be written into the cache.*set DSTRAIN_CACHE to another"):
        open_pdf(path)


def test_a_document_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match=r"gone.pdf cannot be read"):
        DocumentCache.of_file(tmp_path / "gone.pdf", "pypdfium2-5")


def test_words_are_numbers_and_letters_in_lower_case() -> None:
    assert tokenize_words("Total: RM 3,490.50 für ÄÖ_x") == ["total", "rm", "3", "490", "50", "für", "äö", "x"]


def test_scripts_without_spaces_are_split_into_characters() -> None:
    assert tokenize_words("合計は1,200円") == ["合", "計", "は", "1", "200", "円"]


def test_the_page_with_the_rarest_words_comes_first() -> None:
    index = PageIndex(PAGES)
    assert index.rank("How much is the RENT?")[0] == 2
    assert index.rank("Pets allowed?") == [3]


def test_equal_pages_are_ranked_by_number() -> None:
    index = PageIndex(["blue sky", "red sky", "red sky", "red sky"])
    assert index.rank("red") == [2, 3, 4]


def test_a_word_on_every_page_still_counts() -> None:
    """Robertson's weight of such a word is negative, and would rank pages without it first."""
    assert PageIndex(["total", "total total total", "total other words"]).rank("total") == [2, 1, 3]


def test_a_question_that_shares_no_word_ranks_no_page() -> None:
    assert PageIndex(PAGES).rank("Wieviel?") == []
    assert PageIndex(PAGES).rank("") == []
    assert not PageIndex(["", " \n"]).has_text
    assert PageIndex(["", "one"]).rank("one") == [2]


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    question = "when does the tenant pay the rent of the house in March"
    code = "import sys; from dstrain.tasks.docqa.pages import PageIndex; "
    code += "print(PageIndex(sys.argv[2:]).rank(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", code, question, *PAGES * 3],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str(PageIndex(PAGES * 3).rank(question))


def test_a_missing_bm25s_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(DataError, match=r"needs bm25s; run pip install \"dstrain\[docqa\]\""):
        PageIndex(PAGES).rank("rent")


def test_the_text_of_an_image_is_in_a_txt_or_csv_beside_it(tmp_path: Path) -> None:
    image = tmp_path / "a.jpg"
    assert read_sidecar(image) == ""
    (tmp_path / "a.csv").write_text("1,2,3,2,3,4,1,4,TOTAL, RM 8.20\n1,2,3,2,3,4,1,4,THANK YOU\n")
    assert read_sidecar(image) == "TOTAL, RM 8.20\nTHANK YOU"
    (tmp_path / "a.txt").write_text("﻿Total 8.20")
    assert read_sidecar(image) == "Total 8.20"


def test_a_csv_with_named_columns_gives_its_text_column() -> None:
    assert read_boxes('left,top,Text\n1,2,"Total, net"\n3,4,8.20\n5\n') == "Total, net\n8.20"


def test_a_csv_of_another_form_has_no_text() -> None:
    assert read_boxes("a,b\n1,2\n") == ""
    assert read_boxes("") == ""


def test_a_sidecar_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    assert read_sidecar(tmp_path / "a.jpg") == ""
