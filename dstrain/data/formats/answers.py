"""Records of one prompt with any number of answers, to be scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dstrain.data.formats.conversations import LABEL_KEYS, PromptCompletion, read_conversation, read_prompt
from dstrain.data.formats.preferences import (
    Preference,
    Prompt,
    Response,
    is_preference_pair,
    read_preference,
    to_chosen_rejected,
)
from dstrain.data.formats.unpaired import split_last_answer, to_messages
from dstrain.errors import BadRecord

COMPLETIONS = "completions"
"""Column with several answers to the prompt, as `dstrain generate --num-samples` writes it."""
SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class PromptAnswers:
    """A prompt and the answers to score."""

    prompt: Prompt
    answers: tuple[Response, ...]
    form: Literal["answer", "pair", "list"]
    """Where the answers stand in the record: one answer, `chosen` and `rejected`, or `completions`."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""
    is_common_prefix: bool = False
    """True where the prompt is no text of its own, but what both answers have in common at the start."""

    def to_preference(self, number: int) -> Preference:
        """Return answer `number` as both sides of a preference, or the pair itself."""
        first, last = self.answers if self.form == "pair" else (self.answers[number],) * 2
        return Preference(self.prompt, first, last, tools=self.tools, is_common_prefix=self.is_common_prefix)


def read_prompt_answers(record: Mapping[str, Any]) -> PromptAnswers:
    """Return the prompt and the answers of a record of any known form: a pair, `completions`, or one answer.

    Raises BadRecord.
    """
    record = to_chosen_rejected(record)
    if COMPLETIONS in record.present:
        given = record[COMPLETIONS]
        if not isinstance(given, list) or not given:
            raise BadRecord(f"'{COMPLETIONS}' is not a list of answers; write one")
        asked = read_prompt(record.without(COMPLETIONS, *SIDES))
        return PromptAnswers(asked.prompt, _read_answers(given, asked.prompt), "list", asked.tools)
    if is_preference_pair(record):
        pair = read_preference(record)
        return PromptAnswers(pair.prompt, (pair.chosen, pair.rejected), "pair", pair.tools, pair.is_common_prefix)
    sample = read_conversation(record.without(*LABEL_KEYS))
    if isinstance(sample, PromptCompletion):
        if not sample.prompt:
            raise BadRecord("'text' does not say where the answer begins; write 'prompt' and 'completion'")
        return PromptAnswers(sample.prompt, (sample.answer,), "answer")
    prompt, answer = split_last_answer(sample)
    return PromptAnswers(prompt, (answer,), "answer", sample.tools)


def _read_answers(given: list[Any], prompt: Prompt) -> tuple[Response, ...]:
    """Return answers as texts where the prompt is one, else as messages. Raises BadRecord."""
    for number, answer in enumerate(given):
        is_messages = isinstance(answer, list) and all(isinstance(one, Mapping) and "content" in one for one in answer)
        if not (isinstance(answer, str) or is_messages) or (isinstance(prompt, str) and not isinstance(answer, str)):
            raise BadRecord(
                f"'{COMPLETIONS}[{number}]' is neither a text nor messages that answer the prompt; write one"
            )
    return tuple(given if isinstance(prompt, str) else [to_messages(answer, "assistant") for answer in given])
