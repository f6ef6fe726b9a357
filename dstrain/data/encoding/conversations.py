"""Conversations as token ids, and which of them are learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.data.encoding.answer_spans import Written, write
from dstrain.data.encoding.rendering import count_alike
from dstrain.data.encoding.text import Frame, ends_with, frame_of, take_start
from dstrain.data.encoding.truncation import Dialog, Room, count_before, show_limits
from dstrain.data.formats.conversations import Passage, Sample
from dstrain.data.formats.messages import BadRecord
from dstrain.errors import DataError

if TYPE_CHECKING:
    from dstrain.data.vision.expansion import Views


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """How conversations become token ids."""

    max_length: int
    """Tokens of a whole conversation."""
    max_prompt_length: int | None = None
    """Tokens in front of the first answer, the BOS among them."""
    assistant_only: bool = True
    """Whether answers alone are learnt, or every token."""


def encode_conversations(
    tokenizer: Any, samples: Sequence[Sample], settings: TurnSettings, views: Views | None = None
) -> list[dict[str, Any] | BadRecord]:
    """`input_ids` of each sample, and `learnt`, as long: 1 where a token is to be predicted, which no image's is.

    `prompt_cut`, `response_cut` and `last_turn_cut` are 1 where something was cut, else 0. `views`: the images of each.
    """
    frame = frame_of(tokenizer)
    if settings.max_length <= len(frame.start) + len(frame.end):
        raise DataError(f"data.max_length {settings.max_length} leaves no room for text; make it larger")
    enders = tuple(tokenizer.get_added_vocab())
    written = [_try_write(tokenizer, sample, enders, settings.assistant_only) for sample in samples]
    shown = written if views is None else [views.in_written(at, item) for at, item in enumerate(written)]
    coded = _tokenize([item for item in shown if isinstance(item, Written)], tokenizer)
    found: list[dict[str, Any] | BadRecord] = []
    for at, item in enumerate(shown):
        if isinstance(item, BadRecord):
            found.append(item)
            continue
        ids, learnt = next(coded)
        learnt = learnt if views is None else views.not_learnt(ids, learnt)
        texts = written[at].text, item.text, ids  # type: ignore[union-attr]  # shown is a fault where written is one
        before_turn = partial(_before_last_turn, tokenizer, samples[at], texts, (views, at))
        form = frame.without_bos(item.templated, views), settings
        found.append(_assemble((ids, learnt), item.templated, form, before_turn))
    if views is None:
        return found
    limits = show_limits(settings.max_length, settings.max_prompt_length)
    return [views.whole(at, item, limits) for at, item in enumerate(found)]


def _try_write(tokenizer: Any, sample: Sample, enders: tuple[str, ...], assistant_only: bool) -> Written | BadRecord:
    try:
        return write(tokenizer, sample, enders, assistant_only)
    except BadRecord as fault:
        return fault


def _tokenize(written: Sequence[Written], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each text as a whole, and 1 for those of which a letter is learnt."""
    if not written:
        return
    texts = [item.text for item in written]
    # verbose=False: longer than the model is no news here, for the cut comes later.
    ask = partial(tokenizer, add_special_tokens=False, return_attention_mask=False, verbose=False)
    if not tokenizer.is_fast:
        ids_of = lambda text: ask(text)["input_ids"]  # noqa: E731
        yield from (_by_parts(ids_of, item) for item in written)
        return
    found = ask(texts, return_offsets_mapping=True)
    for item, ids, places in zip(written, found["input_ids"], found["offset_mapping"], strict=True):
        starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, starts + 1)  # a token without a letter of its own belongs to the next
        learnt = np.zeros(len(ids), dtype=np.int64)
        for start, end in item.spans:
            learnt |= (starts < end) & (ends > start)
        yield ids, learnt.tolist()


def _by_parts(ids_of: Callable[[str], list[int]], item: Written) -> tuple[list[int], list[int]]:
    """The same from a tokenizer that does not tell its letters: a token belongs to the span that it begins to change."""
    ids = ids_of(item.text)
    count = lambda end: count_alike([ids, ids_of(item.text[:end])])  # noqa: E731
    learnt = [0] * len(ids)
    for start, end in item.spans:
        for at in range(count(start), len(ids) if end == len(item.text) else count(end)):
            learnt[at] = 1
    return ids, learnt


def _before_last_turn(
    tokenizer: Any, sample: Sample, texts: tuple[str, str, list[int]], shown: tuple[Views | None, int]
) -> int:
    """How many of the ids, the last of `texts`, stand before the last user turn in front of the first learnt answer."""
    plain, text, ids = texts
    views, at = shown
    if isinstance(sample, Passage):
        letter = Dialog(tokenizer, sample.prompt, 0).last_turn(plain)
        letter = letter if plain.startswith(sample.prompt) else 0  # a template made a question of it
    else:
        letter = Dialog(tokenizer, sample.messages, sample.learnt[0], False, sample.tools).last_turn(plain)
    letter = letter if views is None else views.moved(at, plain, letter)
    return count_before(tokenizer, text, ids, letter)


def _assemble(
    coded: tuple[list[int], list[int]],
    templated: bool,
    form: tuple[Frame, TurnSettings],
    before_turn: Callable[[], int],
) -> dict[str, Any] | BadRecord:
    """Frame and cut: what stands in front of the first answer from the left, until that fits; then the end."""
    frame, settings = form
    start, ids = take_start(coded[0], frame)
    written = len(coded[1]) - len(ids)
    learnt = coded[1][written:]
    if not templated and not ends_with(ids, list(frame.end)):
        ids, learnt = [*ids, *frame.end], [*learnt, *(1 for _ in frame.end)]
    if 1 not in learnt:
        return BadRecord("no token of it is learnt; write an answer or remove the record")
    prompt = learnt.index(1)
    answer = [*learnt, 0].index(0, prompt) - prompt
    room = Room(settings.max_length, settings.max_prompt_length, len(start))
    kept = room.keep(prompt, answer, lambda: min(prompt + written - before_turn(), prompt))
    if isinstance(kept, BadRecord):
        return kept
    last = len(ids) - learnt[::-1].index(1)  # behind it nothing is learnt
    span = slice(prompt - kept.prompt, min(last, prompt + kept.room))
    cuts = {**kept.cuts, "response_cut": int(span.stop < last)}
    return _finish(start + ids[span], [0] * len(start) + learnt[span], cuts)


def _finish(ids: list[int], learnt: list[int], cuts: dict[str, int]) -> dict[str, Any] | BadRecord:
    """The columns. The first token is nobody's target, and what the cut leaves behind the last answer goes too."""
    learnt = [0, *learnt[1:]]
    if 1 not in learnt:
        return BadRecord("one token is all it becomes, and the first is predicted from nothing; write more")
    last = len(ids) - learnt[::-1].index(1)
    return {"input_ids": ids[:last], "learnt": learnt[:last], **cuts}
