from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dstrain.data.documents.pages import Document
from dstrain.data.documents.source import DocumentQuestion, RetrievalRecall, read_question, retrieve_pages, select_pages
from dstrain.data.records import BadRecord
from tests.unit.data.documents.pdf_files import PAGES


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
