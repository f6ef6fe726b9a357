"""Questions about documents become records with page images, from the file to the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dstrain.tasks.docqa.pages
from dstrain.config.schema import RunConfig
from dstrain.data.sources.base import ConcatSource, HeadSource
from dstrain.data.sources.open import open_source
from dstrain.data.vision.images import read_image, resolve_image
from dstrain.errors import BadRecord
from dstrain.tasks import make_task
from dstrain.tasks.docqa.pages import Document
from dstrain.tasks.docqa.source import (
    DocumentOptions,
    DocumentQuestion,
    DocumentSource,
    RetrievalRecall,
    read_question,
    retrieve_pages,
    select_pages,
)
from tests.tiny import tiny_recipe
from tests.unit.tasks.docqa.pdf_files import PAGES, count_calls, write_empty_pdf, write_pdf
from tests.vocabulary import invoke, write_jsonl

RENT = {"question": "How much is the rent?", "answer": "nine hundred", "document": "contract.pdf"}
TASK = '''
from dataclasses import dataclass
from dstrain.tasks.docqa.source import DocumentOptions
from dstrain.tasks.docqa.source import DocumentSource
from dstrain.tasks.vlm import VLM


@dataclass(frozen=True, kw_only=True)
class DocumentTask(VLM):
    """Questions about two pages of a document."""

    def wrap_source(self, source, item):
        return DocumentSource(source, DocumentOptions(max_pages=2, dpi=36))

    def parse(self, record):
        return super().parse({"question": record["question"], "answer": record["answers"][0]})
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with documents/contract.pdf and a cache of its own."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents").mkdir()
    write_pdf(tmp_path / "documents" / "contract.pdf")
    return tmp_path


def open_questions(folder: Path, rows: list[dict[str, Any]], **options: Any) -> DocumentSource:
    return DocumentSource(open_source(write_jsonl(folder / "questions.jsonl", rows)), DocumentOptions(**options))


def test_a_record_has_its_question_answers_and_pages(folder: Path) -> None:
    rows = [RENT, RENT | {"evidence_pages": [3, 4], "id": 7, "system": "Be brief."}]
    source = open_questions(folder, rows, max_pages=1, dpi=72)
    first, second = source[0], source[1]
    assert {**first, "images": len(first["images"])} == {
        "question": RENT["question"],
        "answers": ["nine hundred"],
        "images": 1,
        "pages": [2],
        "unanswerable": False,
    }
    assert (second["pages"], second["system"]) == ([3], "Be brief.")
    assert read_image(resolve_image(first["images"][0], folder)).size == (200, 100)
    assert (len(source), source.location(1), source.get_base_dir(0)) == (2, "questions.jsonl:2", folder)


@pytest.mark.parametrize("given", [{"answer": ""}, {"answers": []}, {"answer": None}, {"unanswerable": True}])
def test_a_question_without_an_answer_has_the_fixed_one_or_is_refused(folder: Path, given: dict[str, Any]) -> None:
    row = {key: value for key, value in RENT.items() if key != "answer"} | given
    found = open_questions(folder, [row])[0]
    assert (found["answers"], found["unanswerable"]) == (["unanswerable"], True)
    assert open_questions(folder, [row], unanswerable_answer="not stated")[0]["answers"] == ["not stated"]
    with pytest.raises(BadRecord, match=r"no answer, and the option unanswerable_answer is null"):
        open_questions(folder, [row], unanswerable_answer=None)[0]


def test_the_digest_changes_with_the_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [open_questions(folder, [RENT], **options) for options in ({}, {"dpi": 72}, {"max_pages": 1})]
    made.append(open_questions(folder, [RENT | {"answer": "900"}]))
    assert len({source.digest for source in made}) == 4
    assert open_questions(folder, [RENT]).digest == made[0].digest
    monkeypatch.setattr("dstrain.tasks.docqa.source.installed_version", lambda package: "5.99")
    assert open_questions(folder, [RENT]).digest != made[0].digest


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_pages": 0}, r"max_pages is 0"),
        ({"dpi": 5}, r"dpi is 5, but a resolution is between 18 and 1200"),
        ({"unanswerable_answer": " "}, r"unanswerable_answer is blank"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DocumentOptions(**options)


def test_a_document_is_opened_once_for_many_questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_questions(
        folder, [RENT | {"question": f"What about the rent of {at}?"} for at in range(9)], max_pages=1
    )
    calls = count_calls(monkeypatch, dstrain.tasks.docqa.pages, "call_pdfium")
    assert {tuple(source[index]["pages"]) for index in range(len(source))} == {(2,)}
    assert [operation for _, _, operation in calls] == ["opening it", "reading its text"]


def test_what_was_done_is_summed_up_and_noted(folder: Path) -> None:
    rows = [RENT, RENT | {"evidence_pages": 2}, RENT | {"evidence_pages": [1, 2, 4]}, RENT | {"question": "Wieviel?"}]
    source = open_questions(folder, [*rows, RENT | {"answer": ""}], max_pages=2)
    assert source.summarize() == []
    for index in range(len(source)):
        assert source[index]
    assert source.summarize() == [
        "2 questions with given evidence pages",
        "2 questions with retrieved pages",
        "1 question with the first pages, because no page shares a word with the question",
        "1 question with more evidence pages than max_pages, of which the last ones are left out",
        "1 question without an answer",
    ]
    assert [source.get_notes(index) for index in range(5)] == [
        [],
        [],
        ["it has more evidence pages than max_pages: only the first 2 are used"],
        ["no page shares a word with the question: the first 2 pages are used"],
        ["it has no answer: 'unanswerable' is trained on"],
    ]
    recall = source.measure_recall()
    assert (recall.questions, recall.evidence, recall.found) == (2, 4, 3)
    joined = ConcatSource([HeadSource(source, 3), open_source(folder / "questions.jsonl")])
    assert joined.summarize() == source.summarize()
    assert {Path(file.path).name for file in joined.watched_files()} == {"contract.pdf"}


def write_bad_documents(folder: Path) -> list[dict[str, Any]]:
    """Write a document of each fault; return a record about each, after a good one."""
    documents = folder / "documents"
    write_pdf(documents / "locked.pdf", password="user")
    write_empty_pdf(documents / "empty.pdf")
    (documents / "cut.pdf").write_bytes((documents / "contract.pdf").read_bytes()[:400])
    (documents / "letter.docx").write_bytes(b"PK\x03\x04")
    Image.new("RGB", (9, 9)).save(documents / "scan.png")
    (documents / "broken.png").write_bytes((documents / "scan.png").read_bytes()[:-20])
    names = ("locked.pdf", "empty.pdf", "cut.pdf", "letter.docx", "broken.png", "gone.pdf")
    changes = [{"document": name} for name in names]
    changes += [{"evidence_pages": 9}, {"answer": ["", {}]}, {"question": ""}]
    return [RENT, *({**RENT, **change} for change in changes), RENT | {"answer": ""}]


FAULTS = (
    "locked.pdf is encrypted with a password",
    "empty.pdf has no pages",
    "cut.pdf is truncated",
    "letter.docx is not a document of a known kind",
    "broken.png is damaged or truncated",
    "document not found: gone.pdf",
    "'evidence_pages' has page 9, and documents/contract.pdf has 5 pages",
    "'answer' holds an object",
    "'question' is empty",
)


def test_data_check_lists_every_bad_document_and_notes_the_rest(folder: Path) -> None:
    (folder / "task.py").write_text(TASK)
    write_jsonl(folder / "questions.jsonl", write_bad_documents(folder))
    result = invoke("data", "check", "questions.jsonl", "--task", "task.py")
    assert result.exit_code == 2, result.output
    lines = result.output.splitlines()
    for number, (line, fault) in enumerate(zip(lines, FAULTS, strict=False), 2):
        assert line.startswith(f"questions.jsonl:{number}: ")
        assert fault in line
    assert "questions.jsonl:11: note: it has no answer: 'unanswerable' is trained on" in lines
    assert "2 good records, 9 bad, 1 note on records that can be used" in lines
    assert "2 questions with retrieved pages" in lines


def test_data_check_tells_the_recall_of_retrieval(folder: Path) -> None:
    (folder / "task.py").write_text(TASK)
    write_jsonl(folder / "questions.jsonl", [RENT | {"evidence_pages": 2}, RENT | {"evidence_pages": 3}])
    result = invoke("data", "check", "questions.jsonl", "--task", "task.py")
    assert result.exit_code == 0, result.output
    assert "evidence found in 2 pages by retrieval: 50% (1 of 2, 2 questions" in result.output


def train_recipe(folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Return the task of a tiny recipe on these records."""
    (folder / "task.py").write_text(TASK)
    recipe = tiny_recipe("vlm", folder)
    write_jsonl(folder / "questions.jsonl", rows)
    recipe |= {"task": str(folder / "task.py")}
    recipe["data"] |= {"train": "questions.jsonl", "eval": None, "on_error": "skip", "max_length": 256}
    return make_task(RunConfig.model_validate(recipe))


def test_bad_documents_are_skipped_in_training_and_listed(folder: Path) -> None:
    found = train_recipe(folder, write_bad_documents(folder)).examples("train")
    assert len(found) == 2
    assert found.report["skipped"] == len(FAULTS)
    for line, fault in zip(found.report["skipped_records"], FAULTS, strict=True):
        assert fault in line
    assert "2 questions with retrieved pages" in found.report["notes"]
    pages = [image.load() for image in found[0]["images"]]
    assert [page.size for page in pages] == [(16, 16), (16, 16)], "downscaled copies for the processor"
    assert all(np.asarray(page).std() > 1 for page in pages)


def test_a_document_that_changes_is_prepared_again(folder: Path) -> None:
    rows = [RENT | {"evidence_pages": 2}, RENT | {"document": "later.pdf"}]
    first = train_recipe(folder, rows).examples("train")
    assert (len(first), first.report["skipped"]) == (1, 1)
    again = train_recipe(folder, rows).examples("train")
    assert again.store.image_index.find_change() is None
    assert again.image_digest == first.image_digest
    write_pdf(folder / "documents" / "contract.pdf", [f"changed: {text}" for text in PAGES])
    assert again.store.image_index.find_change() == "documents/contract.pdf has changed"
    changed = train_recipe(folder, rows).examples("train")
    assert changed.image_digest != first.image_digest
    write_pdf(folder / "documents" / "later.pdf")
    assert len(train_recipe(folder, rows).examples("train")) == 2


def test_prepared_documents_are_not_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_recipe(folder, [RENT]).examples("train")
    calls = count_calls(monkeypatch, dstrain.tasks.docqa.pages, "call_pdfium")
    assert len(train_recipe(folder, [RENT]).examples("train")) == 1
    assert calls == []


PLAIN = {"question": "How much?", "answer": "7", "document": "a.pdf"}


@pytest.mark.parametrize(
    ("given", "answers"),
    [
        ({"answer": " 7 "}, ("7",)),
        ({"answers": ["7", "seven", "7 "]}, ("7", "seven")),
        ({"answers": "7"}, ("7",)),
        ({"answer": 7}, ("7",)),
        ({"answers": {"text": ["7"], "answer_start": [3]}}, ("7",)),
        ({"answers": ["", "7", None]}, ("7",)),
        ({"answer": "7", "answers": []}, ("7",)),
        ({"answer": "7", "unanswerable": False}, ("7",)),
    ],
)
def test_an_answer_is_a_text_or_a_list_of_accepted_texts(given: dict[str, Any], answers: tuple[str, ...]) -> None:
    assert read_question({"question": "How much?", "document": "a.pdf"} | given).answers == answers


@pytest.mark.parametrize(
    "given",
    [
        {"answer": ""},
        {"answer": None},
        {"answer": "  "},
        {"answers": []},
        {"answers": [""]},
        {"answers": {"text": []}},
        {"unanswerable": True},
        {"is_impossible": True, "answers": []},
    ],
)
def test_an_empty_answer_or_a_mark_says_that_there_is_none(given: dict[str, Any]) -> None:
    assert read_question({"question": "How much?", "document": "a.pdf"} | given).answers == ()


@pytest.mark.parametrize(("given", "pages"), [(3, (3,)), ([5, 2, 5], (2, 5)), ([], ()), (None, ()), ([2.0], (2,))])
def test_evidence_is_a_page_or_a_list_of_pages(given: Any, pages: tuple[int, ...]) -> None:
    assert read_question(PLAIN | {"evidence_pages": given}).evidence_pages == pages


def test_pages_are_a_document_or_images() -> None:
    assert read_question(PLAIN).document == "a.pdf"
    for given in ({"image": "a.png"}, {"images": ["a.png"]}, {"image": ["a.png"]}):
        found = read_question({"question": "How much?", "answer": "7"} | given)
        assert (found.document, found.images) == (None, ("a.png",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": " "}, r"'question' is empty"),
        ({"question": 5}, r"'question' is a number"),
        ({"question": None}, r"'question' is null"),
        ({"document": None}, r"names no document"),
        ({"document": ["a.pdf"]}, r"'document' is a list"),
        ({"document": " "}, r"'document' is empty"),
        ({"image": "a.png"}, r"both 'document' and 'image' are set"),
        ({"document": None, "images": ["a.png", ""]}, r"'images' has an empty path"),
        ({"answers": ["8"]}, r"both 'answer' and 'answers' are set"),
        ({"answer": True}, r"'answer' holds true or false"),
        ({"answer": [["7"]]}, r"'answer' holds a list"),
        ({"unanswerable": True}, r"marked as unanswerable and has the answer '7'"),
        ({"unanswerable": "yes"}, r"'unanswerable' is text"),
        ({"evidence_pages": 0}, r"has page 0; pages are counted from 1"),
        ({"evidence_pages": "2"}, r"'evidence_pages' holds text"),
        ({"evidence_pages": [1.5]}, r"'evidence_pages' holds a number, not a page number"),
        ({"evidence_pages": True}, r"'evidence_pages' holds true or false"),
    ],
)
def test_a_bad_record_is_refused_with_its_key(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        read_question(PLAIN | change)


@pytest.mark.parametrize("key", ["question", "answer"])
def test_a_missing_key_is_not_an_empty_one(key: str) -> None:
    with pytest.raises(BadRecord, match=rf"'{key}'.* missing"):
        read_question({name: value for name, value in PLAIN.items() if name != key})


class TextDocument(Document):
    """A document of texts alone."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__("contract.pdf", texts)

    def read_texts(self) -> list[str]:
        return [*self._pages]


CONTRACT = TextDocument(PAGES)


def asked(question: str = "How much is the rent?", **keys: Any) -> DocumentQuestion:
    return read_question({"question": question, "answer": "nine hundred", "document": "contract.pdf"} | keys)


def test_evidence_wins_over_retrieval() -> None:
    found = select_pages(CONTRACT, asked(evidence_pages=[4]), 1)
    assert (found.pages, found.rule) == ((4,), "evidence")
    assert select_pages(CONTRACT, asked(evidence_pages=[4]), 1, use_evidence=False).pages == (2,)


def test_only_so_many_evidence_pages_are_used_in_the_order_of_the_document() -> None:
    found = select_pages(CONTRACT, asked(evidence_pages=[5, 1, 3]), 2)
    assert (found.pages, found.dropped) == ((1, 3), 1)


def test_a_small_document_is_used_whole() -> None:
    for count in (5, 9):
        found = select_pages(CONTRACT, asked(), count)
        assert (found.pages, found.rule) == ((1, 2, 3, 4, 5), "all")


def test_retrieved_pages_are_in_the_order_of_the_document() -> None:
    found = retrieve_pages(CONTRACT, "In March?", 2)
    assert (found.pages, found.rule) == ((1, 5), "retrieved")
    assert retrieve_pages(CONTRACT, "In March?", 1).pages == (1,), "the shorter of two pages with the word"
    assert CONTRACT.page_index.rank("In March?")[:2] == [1, 5]


def test_pages_without_a_word_of_the_question_fill_up_in_their_order() -> None:
    assert retrieve_pages(CONTRACT, "Pets?", 3).pages == (1, 2, 3)
    assert retrieve_pages(CONTRACT, "notice?", 3).pages == (1, 2, 5)


def test_without_a_common_word_or_any_text_the_first_pages_are_used() -> None:
    assert retrieve_pages(CONTRACT, "Wieviel?", 2) == retrieve_pages(CONTRACT, "???", 2)
    assert (retrieve_pages(CONTRACT, "Wieviel?", 2).pages, retrieve_pages(CONTRACT, "Wieviel?", 2).rule) == (
        (1, 2),
        "no_match",
    )
    found = retrieve_pages(TextDocument(["", " ", "", "\n"]), "How much is the rent?", 3)
    assert (found.pages, found.rule) == ((1, 2, 3), "no_text")


def test_equal_pages_are_taken_by_number() -> None:
    assert retrieve_pages(TextDocument(["same words"] * 6), "same words", 3).pages == (1, 2, 3)


@pytest.mark.parametrize("use_evidence", [True, False])
def test_a_page_that_the_document_does_not_have_is_refused(use_evidence: bool) -> None:
    with pytest.raises(BadRecord, match=r"'evidence_pages' has page 6, and contract.pdf has 5 pages"):
        select_pages(CONTRACT, asked(evidence_pages=[1, 6]), 4, use_evidence)


def test_recall_counts_evidence_pages_of_documents_with_more_pages_than_are_used() -> None:
    recall = RetrievalRecall(1)
    recall.add(CONTRACT, asked("How much is the rent?", evidence_pages=2))
    recall.add(CONTRACT, asked("In March?", evidence_pages=[1, 5]))
    recall.add(CONTRACT, asked("Wieviel?", evidence_pages=4))
    recall.add(CONTRACT, asked("no evidence"))
    recall.add(TextDocument(["one page"]), asked("small document", evidence_pages=1))
    assert (recall.questions, recall.evidence, recall.found) == (3, 4, 2)
    assert recall.recall == 0.5
    assert str(recall) == (
        "evidence found in 1 page by retrieval: 50% (2 of 4, 3 questions on documents of more than 1 page)"
    )
