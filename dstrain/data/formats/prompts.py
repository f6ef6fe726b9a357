"""Parsing of generation prompts from records of any published form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.data.formats.conversations import PromptCompletion, read_conversation
from dstrain.data.formats.messages import parse_prompt_transcript
from dstrain.data.formats.preferences import Prompt, is_preference_pair
from dstrain.data.records import BadRecord

if TYPE_CHECKING:
    from dstrain.data.series.patches import Patches

DUMMY_ANSWER = "answer"
"""Takes the place of an answer that a record may lack, so that one parser reads both."""
ANSWER_KEYS = {"prompt": "completion", "instruction": "output", "question": "answer"}
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
    pair = is_preference_pair(record)
    text = record.get("text")
    if not pair and isinstance(text, str) and (messages := parse_prompt_transcript(text)):
        return ParsedPrompt(messages)
    sample = read_conversation(record if pair else _with_dummy_answer(record))
    if isinstance(sample, PromptCompletion):
        return ParsedPrompt(sample.prompt or sample.answer)
    prompt = sample.messages[: sample.trained_turns[0 if pair else -1]]
    if not prompt:
        raise BadRecord("nothing is asked before the answer; write a user's turn")
    return ParsedPrompt(prompt, sample.tools)


def _with_dummy_answer(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record with an answer, if it asks something."""
    # A label of false refuses a record for sft, but an unwanted answer has a prompt too.
    full = {name: value for name, value in record.items() if name != "label"}
    for key in ("messages", "conversations"):
        turns = full.get(key)
        if isinstance(turns, list):
            last = turns[-1] if turns else None
            if not isinstance(last, Mapping) or last.get("role", last.get("from")) not in ("assistant", "gpt"):
                full[key] = [*turns, {"role": "assistant", "content": DUMMY_ANSWER}]
            return full
    for key, answer_key in ANSWER_KEYS.items():
        if full.get(key) is not None:
            return full | {answer_key: DUMMY_ANSWER}
    return full
