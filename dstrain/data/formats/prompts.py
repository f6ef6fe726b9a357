"""From a record, in any form it is published in, to what it asks, and to the ids that a model answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL
from dstrain.data.encoding.rendering import render_prompt
from dstrain.data.encoding.text import get_special_tokens, split_bos
from dstrain.data.formats.conversations import PromptCompletion, read_conversation
from dstrain.data.formats.transcripts import IMAGE_PLACEHOLDER, Message, parse_prompt_transcript
from dstrain.data.records import BadRecord

if TYPE_CHECKING:
    from dstrain.data.vision.expansion import PlaceholderExpansion

DUMMY_ANSWER = "answer"
"""Stands for an answer that a record may lack."""
ANSWER_KEYS = {"prompt": "completion", "instruction": "output", "question": "answer"}
"""Key of what is asked -> key of what is said to it."""


@dataclass(frozen=True)
class ParsedPrompt:
    """What a model is to answer."""

    prompt: str | list[Message]
    """A text that the answer continues as it stands, or a dialog that ends with another's turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that the assistant may call, for the chat template."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    text: str
    """Before it was cut; an image is the token that stands for it."""
    ids: list[int]
    images: tuple[Any, ...] = ()
    """What `dstrain.data.vision.image_io.read_image` takes, in the order of their places in the ids."""


def read_prompt(record: Mapping[str, Any]) -> ParsedPrompt:
    """What a record of any known form asks: a whole dialog's last answer is left out, and may be absent.

    Raises BadRecord.
    """
    pair = any(record.get(key) is not None for key in ("chosen", "rejected")) or isinstance(record.get("output"), list)
    if not pair and isinstance(record.get("text"), str) and (dialog := parse_prompt_transcript(record["text"])):
        return ParsedPrompt(dialog)
    sample = read_conversation(record if pair else _with_dummy_answer(record))
    if isinstance(sample, PromptCompletion):
        return ParsedPrompt(sample.prompt or sample.answer)
    prompt = sample.messages[: sample.trained_turns[0 if pair else -1]]
    if not prompt:
        raise BadRecord("nothing is asked before the answer; write a user's turn")
    return ParsedPrompt(prompt, sample.tools)


def _with_dummy_answer(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with an answer, as far as it asks something."""
    full = {name: value for name, value in record.items() if name != "label"}  # a bad answer has a prompt too
    for key in ("messages", "conversations"):
        turns = full.get(key)
        if isinstance(turns, list):
            last = turns[-1] if turns else None
            if not isinstance(last, Mapping) or last.get("role", last.get("from")) not in ("assistant", "gpt"):
                full[key] = [*turns, {"role": "assistant", "content": DUMMY_ANSWER}]
            return full
    for key, other in ANSWER_KEYS.items():
        if full.get(key) is not None:
            return full | {other: DUMMY_ANSWER}
    return full


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[ParsedPrompt],
    max_length: int | None = None,
    expansion: PlaceholderExpansion | None = None,
) -> list[EncodedPrompt | BadRecord]:
    """Each prompt as text, written as in training, and its ids: the last `limit` of them, behind the BOS.

    `views`: the images of each.
    """
    frame = get_special_tokens(tokenizer)
    found: list[EncodedPrompt | BadRecord] = []
    for at, one in enumerate(prompts):
        try:
            rendered = render_prompt(tokenizer, one.prompt, (), one.tools)
        except BadRecord as fault:
            found.append(fault)
            continue
        shown = rendered if expansion is None else expansion.expand_prompt(at, rendered)
        if isinstance(shown, BadRecord):
            found.append(shown)
            continue
        text_ids = tokenizer(shown.prompt, add_special_tokens=False, verbose=False)["input_ids"]
        start, body = split_bos(text_ids, frame.for_template(shown.used_chat_template, expansion))
        keep = len(body) if max_length is None else min(len(body), max(max_length - len(start), 0))
        ids = start + body[len(body) - keep :]
        room = f"the room for a prompt, {max_length} tokens,"
        whole = {"input_ids": ids} if expansion is None else expansion.check_truncation(at, {"input_ids": ids}, room)
        if isinstance(whole, BadRecord):
            found.append(whole)
            continue
        text = (
            rendered.prompt
            if expansion is None
            else rendered.prompt.replace(IMAGE_PLACEHOLDER, expansion.vision_processor.image_token)
        )
        found.append(EncodedPrompt(text, ids) if ids else BadRecord("the prompt becomes no token; write one"))
    return found


def stop_token_ids(tokenizer: Any) -> set[int]:
    """The ids that end an answer: the tokenizer's EOS, and what its chat template puts behind an assistant's turn."""
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        rendered = render_prompt(tokenizer, [{"role": "user", "content": "question"}], [ANSWER_SENTINEL])
    except BadRecord:  # a template that wants more than a question
        return found
    behind = rendered.answers[0].rpartition(ANSWER_SENTINEL)[2]
    special = set(tokenizer.get_added_vocab().values())
    ids = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"] if behind else []
    return found | {int(token) for token in ids[:1] if token in special}
