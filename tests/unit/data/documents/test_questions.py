from __future__ import annotations

from typing import Any

import pytest

from dstrain.data.documents.source import read_question
from dstrain.data.records import BadRecord

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
