from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dstrain.data.documents import pages
from dstrain.data.documents.pages import DocumentCache, PdfDocument
from dstrain.data.records import BadRecord
from dstrain.data.vision.image_io import read_image
from dstrain.errors import DataError
from tests.unit.data.documents.pdf_files import PAGES, count_calls, write_one_page, write_pdf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def open_pdf(path: Path, dpi: int = 72) -> PdfDocument:
    return PdfDocument(path, path.name, dpi)


def test_opening_a_document_renders_nothing_and_reads_no_text(tmp_path: Path, cache: Path) -> None:
    found = open_pdf(write_pdf(tmp_path / "a.pdf"))
    assert found.num_pages == len(PAGES)
    assert [file.name for file in cache.rglob("p*") if file.is_file()] == ["pages.json"]


def test_a_page_is_rendered_once_and_only_if_it_is_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
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
    assert [file.name for file in cache.rglob("*.png")] == ["00003.png"]


def test_pages_are_kept_by_content_resolution_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = write_pdf(tmp_path / "a.pdf"), write_pdf(tmp_path / "b.pdf", ["another"])
    (tmp_path / "c.pdf").write_bytes(first.read_bytes())
    file = open_pdf(first).get_image(1).get_file()
    assert open_pdf(tmp_path / "c.pdf").get_image(1).get_file() == file
    assert open_pdf(other).get_image(1).get_file() != file
    assert open_pdf(first, 100).get_image(1).get_file() != file
    monkeypatch.setattr(pages, "pdfium_version", lambda: "5.99")
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


def test_two_processes_at_once_read_the_same_pages(tmp_path: Path, cache: Path) -> None:
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
    assert [*cache.rglob("*.partial")] == []


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
def test_a_cache_that_is_not_writable_is_named(tmp_path: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
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
