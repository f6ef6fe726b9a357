"""From a record, in any form it is published in, to what it asks, and to the ids that a model answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.data.encoding.answer_spans import MARK
from dstrain.data.encoding.rendering import render
from dstrain.data.encoding.text import frame_of, take_start
from dstrain.data.formats.conversations import Passage, read_conversation
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.transcripts import IMAGE, Message, open_dialog

if TYPE_CHECKING:
    from dstrain.data.vision.expansion import Views

ANSWER = "answer"
"""Stands for an answer that a record may lack."""
BESIDE = {"prompt": "completion", "instruction": "output", "question": "answer"}
"""Key of what is asked -> key of what is said to it."""


@dataclass(frozen=True)
class Asked:
    """What a model is to answer."""

    prompt: str | list[Message]
    """A text that the answer continues as it stands, or a dialog that ends with another's turn."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that the assistant may call, for the chat template."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it."""

    text: str
    """Before it was cut; an image is the token that stands for it."""
    ids: list[int]
    images: tuple[Any, ...] = ()
    """What `dstrain.data.vision.image_io.read_image` takes, in the order of their places in the ids."""


def read_prompt(record: Mapping[str, Any]) -> Asked:
    """What a record of any known form asks: a whole dialog's last answer is left out, and may be absent.

    Raises BadRecord.
    """
    pair = any(record.get(key) is not None for key in ("chosen", "rejected")) or isinstance(record.get("output"), list)
    if not pair and isinstance(record.get("text"), str) and (dialog := open_dialog(record["text"])):
        return Asked(dialog)
    sample = read_conversation(record if pair else _answered(record))
    if isinstance(sample, Passage):
        return Asked(sample.prompt or sample.answer)
    prompt = sample.messages[: sample.learnt[0 if pair else -1]]
    if not prompt:
        raise BadRecord("nothing is asked before the answer; write a user's turn")
    return Asked(prompt, sample.tools)


def _answered(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with an answer, as far as it asks something."""
    full = {name: value for name, value in record.items() if name != "label"}  # a bad answer has a prompt too
    for key in ("messages", "conversations"):
        turns = full.get(key)
        if isinstance(turns, list):
            last = turns[-1] if turns else None
            if not isinstance(last, Mapping) or last.get("role", last.get("from")) not in ("assistant", "gpt"):
                full[key] = [*turns, {"role": "assistant", "content": ANSWER}]
            return full
    for key, other in BESIDE.items():
        if full.get(key) is not None:
            return full | {other: ANSWER}
    return full


def encode_prompts(
    tokenizer: Any, asked: Sequence[Asked], limit: int | None = None, views: Views | None = None
) -> list[Prompt | BadRecord]:
    """Each prompt as text, written as in training, and its ids: the last `limit` of them, behind the BOS.

    `views`: the images of each.
    """
    frame = frame_of(tokenizer)
    found: list[Prompt | BadRecord] = []
    for at, one in enumerate(asked):
        try:
            rendered = render(tokenizer, one.prompt, (), one.tools)
        except BadRecord as fault:
            found.append(fault)
            continue
        shown = rendered if views is None else views.in_prompt(at, rendered)
        if isinstance(shown, BadRecord):
            found.append(shown)
            continue
        text_ids = tokenizer(shown.prompt, add_special_tokens=False, verbose=False)["input_ids"]
        start, body = take_start(text_ids, frame.without_bos(shown.templated, views))
        keep = len(body) if limit is None else min(len(body), max(limit - len(start), 0))
        ids = start + body[len(body) - keep :]
        room = f"the room for a prompt, {limit} tokens,"
        whole = {"input_ids": ids} if views is None else views.whole(at, {"input_ids": ids}, room)
        if isinstance(whole, BadRecord):
            found.append(whole)
            continue
        text = rendered.prompt if views is None else rendered.prompt.replace(IMAGE, views.sight.mark)
        found.append(Prompt(text, ids) if ids else BadRecord("the prompt becomes no token; write one"))
    return found


def enders(tokenizer: Any) -> set[int]:
    """The ids that end an answer: the tokenizer's EOS, and what its chat template puts behind an assistant's turn."""
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        rendered = render(tokenizer, [{"role": "user", "content": "question"}], [MARK])
    except BadRecord:  # a template that wants more than a question
        return found
    behind = rendered.answers[0].rpartition(MARK)[2]
    special = set(tokenizer.get_added_vocab().values())
    ids = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"] if behind else []
    return found | {int(token) for token in ids[:1] if token in special}
