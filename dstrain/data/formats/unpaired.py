"""Unpaired preference records (KTO), parsed to a prompt, an answer and its label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.data.formats.conversations import (
    LABEL_KEYS,
    Conversation,
    PromptCompletion,
    Sample,
    get_message_field,
    read_conversation,
)
from dstrain.data.formats.messages import IMAGE_KEYS, Message, is_null_image
from dstrain.data.formats.preferences import Prompt, Response, is_preference_pair, read_preference, to_chosen_rejected
from dstrain.data.records import as_record
from dstrain.errors import BadRecord, suggest_name


@dataclass(frozen=True)
class UnpairedPreference:
    """An answer that people wanted, or one that they did not."""

    prompt: Prompt
    """A text that the answer continues as it is, or a conversation with a user's turn in it."""
    answer: Response
    """A text if the prompt is one; otherwise one or more messages."""
    desirable: bool
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""

    def build_sample(self, answer_source: UnpairedPreference) -> Sample:
        """Return this prompt with the answer of `answer_source`, the only part that is trained on."""
        if isinstance(self.prompt, str) and isinstance(answer_source.answer, str):
            return PromptCompletion(self.prompt, answer_source.answer)
        prompt = to_messages(self.prompt, "user")
        answer = to_messages(answer_source.answer, "assistant")
        trained = tuple(
            turn
            for turn, message in enumerate(answer, len(prompt))
            if message["role"] == "assistant" and get_message_field(message, "weight") != 0
        )
        return Conversation(prompt + answer, trained, self.tools)


def to_messages(text: Prompt | Response, role: str) -> list[Message]:
    """Return a text as one message; the space between prompt and answer belongs to neither."""
    return [{"role": role, "content": text.removeprefix(" ")}] if isinstance(text, str) else text


def read_unpaired(record: Mapping[str, Any]) -> list[UnpairedPreference]:
    """Return the labelled answer of a record of any known form, or both answers of a pair.

    Raises BadRecord.
    """
    record = to_chosen_rejected(record)
    if is_preference_pair(record):
        return _from_preference(record)
    desirable = _read_label(record)
    # Without the label, whose value False read_conversation refuses.
    sample = read_conversation(record.without(*LABEL_KEYS))
    if isinstance(sample, PromptCompletion):
        if not sample.prompt:
            raise BadRecord("'text' does not say where the answer begins; write 'prompt' and 'completion'")
        return [UnpairedPreference(sample.prompt, sample.answer, desirable)]
    return [UnpairedPreference(*split_last_answer(sample), desirable, sample.tools)]


def _from_preference(record: Mapping[str, Any]) -> list[UnpairedPreference]:
    """Return the chosen answer as desirable and the rejected one as undesirable."""
    found = read_preference(record)
    # read_preference ignores images; silently training without them would be wrong.
    images = as_record(record).read(*IMAGE_KEYS)
    if any(not is_null_image(value) for value in images):
        raise BadRecord("'images' are not text, and kto trains on text only; remove the record")
    answers = found.chosen, found.rejected
    if not isinstance(found.prompt, str):
        answers = to_messages(found.chosen, "assistant"), to_messages(found.rejected, "assistant")
    return [
        UnpairedPreference(found.prompt, answer, desirable, found.tools)
        for answer, desirable in zip(answers, (True, False), strict=True)
    ]


def _read_label(record: Mapping[str, Any]) -> bool:
    record = as_record(record)
    given = [name for name in LABEL_KEYS if name in record.present]
    if len(given) > 1 and record[given[0]] != record[given[1]]:
        raise BadRecord(f"'{given[0]}' and '{given[1]}' contradict each other; keep one of them")
    name = next(iter(given), None)
    if name is None:
        if null := next((name for name in LABEL_KEYS if name in record), None):
            raise BadRecord(f"'{null}' is null; write true or false, or remove the record")
        near = suggest_name(LABEL_KEYS[0], list(record)).replace("known here:", "its keys are:")
        raise BadRecord(f"no '{LABEL_KEYS[0]}' ({near}); write true or false, or rename a column with data.columns")
    value = record[name]
    if not isinstance(value, int | float) or value not in (0, 1):
        raise BadRecord(
            f"'{name}' is {value!r:.40}; write true for an answer that was wanted, false for one that was not"
        )
    return bool(value)


def split_last_answer(sample: Conversation) -> tuple[list[Message], list[Message]]:
    """Return (prompt, answer): the answer is the assistant's text and tool calls after the last system or user turn.

    Raises BadRecord if no user's turn comes before.
    """
    end = sample.trained_turns[-1] + 1
    others = [turn for turn in range(end) if sample.messages[turn]["role"] in ("system", "user")]
    start = others[-1] + 1 if others else 0
    if not any(message["role"] == "user" for message in sample.messages[:start]):
        raise BadRecord("no user's turn comes before the answer; write the prompt in front of it")
    return sample.messages[:start], sample.messages[start:end]
