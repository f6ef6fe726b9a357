from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from dstrain.data.sources.open import open_source
from dstrain.data.vision.images import read_image, resolve_image
from dstrain.tasks.docqa.source import DocumentOptions, DocumentSource
from tests.vocabulary import read_jsonl

ROOT = Path(__file__).parents[3]
SHOPS = ("ALPHA BAKERY", "BETA BOOKS", "GAMMA GARDEN", "DELTA DINER", "EPSILON ELECTRIC")


@pytest.fixture(scope="session")
def converter() -> ModuleType:
    """The module tools/convert_sroie.py."""
    spec = importlib.util.spec_from_file_location("convert_sroie", ROOT / "tools" / "convert_sroie.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five made-up receipts in SROIE's form; the cache is the test's own."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sroie"
    for name in ("images", "ocr_boxes"):
        (folder / name).mkdir(parents=True)
    rows = []
    for number, shop in enumerate(SHOPS):
        Image.new("RGB", (120, 200), (200, 10 * number, 90)).save(folder / "images" / f"{number}.jpg")
        row = {
            "company": shop,
            "date": f"0{number + 1}/03/2018",
            "address": f"{number} MAIN ROAD",
            "total": f"RM{number}.50",
        }
        boxes = [
            f"10,{20 * at},90,{20 * at},90,{20 * at + 12},10,{20 * at + 12},{text}"
            for at, text in enumerate(row.values())
        ]
        (folder / "ocr_boxes" / f"{number}.csv").write_text("\n".join(boxes) + "\n")
        rows.append({"image": f"images/{number}.jpg", **row})
    (folder / "fields.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def open_questions(file: Path, **options: Any) -> DocumentSource:
    return DocumentSource(open_source(file), DocumentOptions(**options))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--pdf"], ["--pages", "2"], ["--pdf", "--pages", "2"]])
def test_every_form_gives_readable_questions_about_receipts_of_one_split(
    converter: ModuleType, receipts: Path, tmp_path: Path, arguments: list[str]
) -> None:
    converter.main([str(receipts), str(tmp_path / "out"), *arguments])
    companies = {}
    for split, count in (("train", 4), ("eval", 1)):
        rows = read_jsonl(tmp_path / "out" / split / "questions.jsonl")
        assert len(rows) == 4 * count
        source = open_questions(tmp_path / "out" / split / "questions.jsonl", max_pages=1)
        for index, row in enumerate(rows):
            found = source[index]
            assert found["pages"] == row["evidence_pages"]
            image = read_image(resolve_image(found["images"][0], source.get_base_dir(index)))
            assert image.size == (120, 200), "a PDF's page at 144 dpi has the image's pixels"
        companies[split] = {row["answers"][0] for row in rows if "company issued" in row["question"]}
    assert companies["train"] | companies["eval"] == {*SHOPS}
    assert not companies["train"] & companies["eval"]


@pytest.mark.parametrize("arguments", [[], ["--pdf"]])
def test_retrieval_finds_the_receipt_that_a_question_is_about(
    converter: ModuleType, receipts: Path, tmp_path: Path, arguments: list[str]
) -> None:
    converter.main([str(receipts), str(tmp_path / "out"), "--pages", "4", *arguments])
    source = open_questions(tmp_path / "out" / "train" / "questions.jsonl", max_pages=1)
    recall = source.measure_recall()
    assert (recall.questions, recall.recall) == (16, 1.0)


def test_equal_receipts_give_equal_files(converter: ModuleType, receipts: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        converter.main([str(receipts), str(tmp_path / name), "--pdf", "--pages", "2"])
    files = sorted(file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*") if file.is_file())
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_question_that_fits_two_receipts_of_a_document_is_left_out(converter: ModuleType) -> None:
    fields = [{"company": "A", "date": date, "address": "ROAD", "total": "1"} for date in ("1 MAY", "2 MAY")]
    same = [converter.Receipt(Path(f"{at}.jpg"), one, "") for at, one in enumerate(fields)]
    asked = [row["question"] for row in converter.make_questions("a.pdf", same)]
    assert asked == [
        "Which company issued the receipt of 1 MAY with the total 1?",
        "What is the total amount of the receipt of A of 1 MAY?",
        "Which company issued the receipt of 2 MAY with the total 1?",
        "What is the total amount of the receipt of A of 2 MAY?",
    ]


def test_a_total_is_accepted_without_its_currency(converter: ModuleType) -> None:
    assert converter.accepted_answers("total", "RM33.90") == ["RM33.90", "33.90"]
    assert converter.accepted_answers("total", "7.60") == ["7.60"]
    assert converter.accepted_answers("company", "RM TRADING") == ["RM TRADING"]


def test_data_is_not_written_into_the_repository(converter: ModuleType, receipts: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        converter.main([str(receipts), str(ROOT / "dstrain" / "receipts")])
    assert not (ROOT / "dstrain" / "receipts").exists()


def test_real_receipts_become_questions_and_retrieval_finds_their_pages(
    converter: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sroie = data / "docqa" / "sroie"
    if not (sroie / "fields.jsonl").is_file():
        pytest.skip(f"no receipts of SROIE in {sroie}")
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    converter.main([str(sroie), str(tmp_path / "out"), "--pdf", "--pages", "8", "--eval-fraction", "0.4"])
    source = open_questions(tmp_path / "out" / "eval" / "questions.jsonl", max_pages=2)
    assert len(source) >= 16
    recall = source.measure_recall()
    assert recall.questions == len(source)
    assert recall.recall >= 0.9
    found = source[0]
    page = read_image(resolve_image(found["images"][0], tmp_path))
    assert max(page.size) > 1000
    with (sroie / "ocr_boxes" / "035.csv").open(newline="") as file:
        assert len(next(csv.reader(file))) >= 9
