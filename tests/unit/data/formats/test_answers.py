"""Answers to score: the same from a pair, from `completions` and from a single answer."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.data.formats.answers import PromptAnswers, read_prompt_answers
from dstrain.errors import BadRecord
from tests.vocabulary import message

QUESTION, ANSWER, OTHER = message("user", "2+2?"), message("assistant", "4"), message("assistant", "5")
FORMS: dict[str, tuple[dict[str, Any], PromptAnswers]] = {
    "texts": ({"prompt": "2+2?", "completions": ["4", "5"]}, PromptAnswers("2+2?", ("4", "5"), "list")),
    "messages": (
        {"prompt": [QUESTION], "completions": [[ANSWER], "5"]},
        PromptAnswers([QUESTION], ([ANSWER], [OTHER]), "list"),
    ),
    "a pair": (
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        PromptAnswers("2+2?", ("4", "5"), "pair"),
    ),
    "one answer": ({"prompt": "2+2?", "completion": "4"}, PromptAnswers("2+2?", ("4",), "answer")),
    "one answer in messages": (
        {"messages": [QUESTION, ANSWER]},
        PromptAnswers([QUESTION], ([ANSWER],), "answer"),
    ),
    "an answer with a label": (
        {"prompt": [QUESTION], "completion": [ANSWER], "label": False},
        PromptAnswers([QUESTION], ([ANSWER],), "answer"),
    ),
    "conversations with messages": (
        {"messages": [QUESTION], "completions": ["4"]},
        PromptAnswers([QUESTION], ([ANSWER],), "list"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_a_prompt_and_its_answers(form: str) -> None:
    record, wanted = FORMS[form]
    assert read_prompt_answers(record) == wanted


def test_each_answer_is_both_sides_of_a_preference() -> None:
    listed = read_prompt_answers(FORMS["texts"][0])
    second = listed.to_preference(1)
    assert (second.prompt, second.chosen, second.rejected) == ("2+2?", "5", "5")
    pair = read_prompt_answers(FORMS["a pair"][0]).to_preference(0)
    assert (pair.chosen, pair.rejected) == ("4", "5")


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"prompt": "2+2?", "completions": "4"}, "'completions' is not a list of answers"),
        ({"prompt": "2+2?", "completions": []}, "'completions' is not a list of answers"),
        ({"prompt": "2+2?", "completions": ["4", 5]}, r"'completions\[1\]' is neither a text nor messages"),
        ({"prompt": "2+2?", "completions": [[ANSWER]]}, r"'completions\[0\]' is neither a text nor messages"),
        ({"completions": ["4"]}, "no conversation: the keys are none"),
        ({"text": "2+2? 4"}, "does not say where the answer begins"),
        ({"messages": [QUESTION]}, "has no turn of the assistant"),
    ],
)
def test_what_has_no_answers_is_bad(record: dict[str, Any], wanted: str) -> None:
    with pytest.raises(BadRecord, match=wanted):
        read_prompt_answers(record)


def test_a_rating_of_helpsteer_is_one_answer() -> None:
    record = {"prompt": "2+2?", "response": "4", "helpfulness": 3, "correctness": 4, "verbosity": 1}
    assert read_prompt_answers(record) == PromptAnswers("2+2?", ("4",), "answer")
