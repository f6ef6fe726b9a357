"""Parsing of generation prompts from records of any published form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.data.formats.conversations import LABEL_KEYS, Conversation, PromptCompletion, read_conversation
from dstrain.data.formats.messages import MESSAGES_KEYS, get_turn_pair, parse_prompt_transcript
from dstrain.data.formats.preferences import Prompt, is_preference_pair, to_chosen_rejected
from dstrain.data.records import BadRecord, Record, has

if TYPE_CHECKING:
    from dstrain.data.series.patches import Patches

DUMMY_ANSWER = "answer"
"""Takes the place of an answer that a record may lack, so that one parser reads both."""
ANSWER_MESSAGE = {"role": "assistant", "content": DUMMY_ANSWER}
ANSWER_KEYS = {
    "instruction": "output",
    "prompt": "completion",
    "question": "answer",
    "query": "response",
    "problem": "solution",
    "inputs": "targets",
    "input": "output",
}
"""Key of the question -> key of its answer."""


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt that a model is to answer."""

    prompt: Prompt
    """A text that the answer continues as it is, or a conversation that ends with another's turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call, for the chat template."""
    series: Patches | None = None
    """Time series whose soft tokens stand before the prompt."""


def read_prompt(record: Mapping[str, Any]) -> ParsedPrompt:
    """Return the prompt of a record of any known form.

    The last answer of a complete conversation is dropped, and may be missing. Raises BadRecord.
    """
    record = to_chosen_rejected(record)
    pair = is_preference_pair(record)
    text = record["text"] if not pair and has(record, "text") else None
    if isinstance(text, str) and (messages := parse_prompt_transcript(text)):
        return ParsedPrompt(messages)
    sample = read_conversation(record if pair else _with_dummy_answer(record))
    if isinstance(sample, PromptCompletion):
        return ParsedPrompt(sample.prompt or sample.answer)
    prompt = sample.messages[: sample.trained_turns[0 if pair else -1]]
    if not prompt:
        raise BadRecord("nothing is asked before the answer; write a user's turn")
    return ParsedPrompt(prompt, sample.tools)


def get_prompt(parsed: Any) -> Prompt | None:
    """Return what stands before the first answer of a parsed record, None where that asks nothing.

    The answers of a record have one prompt.
    """
    first = parsed[0] if isinstance(parsed, list) and parsed else parsed
    prompt = getattr(first, "prompt", None)
    if isinstance(first, Conversation):
        prompt = first.messages[: first.trained_turns[0]]
    if not isinstance(prompt, str) and all(message["role"] == "system" for message in prompt or ()):
        return None
    return prompt or None


def _with_dummy_answer(record: Record) -> Record:
    """Return the record with an answer, if it asks something."""
    # A label of false refuses a record for sft, but an unwanted answer has a prompt too.
    full = record.without(*LABEL_KEYS)
    for key in MESSAGES_KEYS:
        turns = dict.get(full, key)
        if isinstance(turns, list):
            last = turns[-1] if turns else None
            if isinstance(last, str):
                return full if len(turns) % 2 == 0 else full.derive({**full, key: [*turns, DUMMY_ANSWER]})
            answered = isinstance(last, Mapping) and (
                get_turn_pair(last) or last.get("role", last.get("from")) in ("assistant", "gpt")
            )
            return full if answered else full.derive({**full, key: [*turns, ANSWER_MESSAGE]})
    for key, answer_key in ANSWER_KEYS.items():
        if has(full, key):
            return full.derive({**full, answer_key: DUMMY_ANSWER})
    return full
