"""Conversations as token ids, and which of them are learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.data.encoding.answer_spans import RenderedSample, render_sample
from dstrain.data.encoding.rendering import common_prefix_length
from dstrain.data.encoding.text import SpecialTokens, get_special_tokens, has_suffix, split_bos
from dstrain.data.encoding.truncation import LastTurnFinder, TokenBudget, count_tokens_before, describe_limits
from dstrain.data.formats.conversations import PromptCompletion, Sample
from dstrain.data.records import BadRecord
from dstrain.errors import DataError

if TYPE_CHECKING:
    from dstrain.data.vision.expansion import PlaceholderExpansion


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """How conversations become token ids."""

    max_length: int
    """Tokens of a whole conversation."""
    max_prompt_length: int | None = None
    """Tokens in front of the first answer, the BOS among them."""
    assistant_only: bool = True
    """Whether answers alone are learnt, or every token."""


def encode_conversations(
    tokenizer: Any, samples: Sequence[Sample], config: EncodingConfig, expansion: PlaceholderExpansion | None = None
) -> list[dict[str, Any] | BadRecord]:
    """`input_ids` of each sample, and `learnt`, as long: 1 where a token is to be predicted, which no image's is.

    `prompt_cut`, `response_cut` and `last_turn_cut` are 1 where something was cut, else 0. `views`: the images of each.
    """
    frame = get_special_tokens(tokenizer)
    if config.max_length <= len(frame.prefix_ids) + len(frame.suffix_ids):
        raise DataError(f"data.max_length {config.max_length} leaves no room for text; make it larger")
    enders = tuple(tokenizer.get_added_vocab())
    written = [_try_render_sample(tokenizer, sample, enders, config.assistant_only) for sample in samples]
    shown = written if expansion is None else [expansion.expand_sample(at, item) for at, item in enumerate(written)]
    coded = _tokenize_samples([item for item in shown if isinstance(item, RenderedSample)], tokenizer)
    found: list[dict[str, Any] | BadRecord] = []
    for at, item in enumerate(shown):
        if isinstance(item, BadRecord):
            found.append(item)
            continue
        ids, learnt = next(coded)
        learnt = learnt if expansion is None else expansion.mask_image_tokens(ids, learnt)
        texts = written[at].text, item.text, ids  # type: ignore[union-attr]  # shown is a fault where written is one
        before_turn = partial(_tokens_before_last_turn, tokenizer, samples[at], texts, (expansion, at))
        form = frame.for_template(item.used_chat_template, expansion), config
        found.append(_build_example((ids, learnt), item.used_chat_template, form, before_turn))
    if expansion is None:
        return found
    limits = describe_limits(config.max_length, config.max_prompt_length)
    return [expansion.check_truncation(at, item, limits) for at, item in enumerate(found)]


def _try_render_sample(
    tokenizer: Any, sample: Sample, end_tokens: tuple[str, ...], assistant_only: bool
) -> RenderedSample | BadRecord:
    try:
        return render_sample(tokenizer, sample, end_tokens, assistant_only)
    except BadRecord as fault:
        return fault


def _tokenize_samples(rendered: Sequence[RenderedSample], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of each text as a whole, and 1 for those of which a letter is learnt."""
    if not rendered:
        return
    texts = [item.text for item in rendered]
    # verbose=False: longer than the model is no news here, for the cut comes later.
    ask = partial(tokenizer, add_special_tokens=False, return_attention_mask=False, verbose=False)
    if not tokenizer.is_fast:
        ids_of = lambda text: ask(text)["input_ids"]  # noqa: E731
        yield from (_tokenize_without_offsets(ids_of, item) for item in rendered)
        return
    found = ask(texts, return_offsets_mapping=True)
    for item, ids, places in zip(rendered, found["input_ids"], found["offset_mapping"], strict=True):
        starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, starts + 1)  # a token without a letter of its own belongs to the next
        learnt = np.zeros(len(ids), dtype=np.int64)
        for start, end in item.trained_spans:
            learnt |= (starts < end) & (ends > start)
        yield ids, learnt.tolist()


def _tokenize_without_offsets(
    encode_text: Callable[[str], list[int]], rendered: RenderedSample
) -> tuple[list[int], list[int]]:
    """The same from a tokenizer that does not tell its letters: a token belongs to the span that it begins to change."""
    ids = encode_text(rendered.text)
    count = lambda end: common_prefix_length([ids, encode_text(rendered.text[:end])])  # noqa: E731
    learnt = [0] * len(ids)
    for start, end in rendered.trained_spans:
        for at in range(count(start), len(ids) if end == len(rendered.text) else count(end)):
            learnt[at] = 1
    return ids, learnt


def _tokens_before_last_turn(
    tokenizer: Any,
    sample: Sample,
    rendered: tuple[str, str, list[int]],
    expansion_at: tuple[PlaceholderExpansion | None, int],
) -> int:
    """How many of the ids, the last of `texts`, stand before the last user turn in front of the first learnt answer."""
    plain, text, ids = rendered
    views, at = expansion_at
    if isinstance(sample, PromptCompletion):
        letter = LastTurnFinder(tokenizer, sample.prompt, 0).find_last_turn(plain)
        letter = letter if plain.startswith(sample.prompt) else 0  # a template made a question of it
    else:
        letter = LastTurnFinder(
            tokenizer, sample.messages, sample.trained_turns[0], False, sample.tools
        ).find_last_turn(plain)
    letter = letter if views is None else views.map_offset(at, plain, letter)
    return count_tokens_before(tokenizer, text, ids, letter)


def _build_example(
    encoded: tuple[list[int], list[int]],
    used_chat_template: bool,
    encoding_setup: tuple[SpecialTokens, EncodingConfig],
    get_last_turn_start: Callable[[], int],
) -> dict[str, Any] | BadRecord:
    """Frame and cut: what stands in front of the first answer from the left, until that fits; then the end."""
    frame, settings = encoding_setup
    start, ids = split_bos(encoded[0], frame)
    written = len(encoded[1]) - len(ids)
    learnt = encoded[1][written:]
    if not used_chat_template and not has_suffix(ids, list(frame.suffix_ids)):
        ids, learnt = [*ids, *frame.suffix_ids], [*learnt, *(1 for _ in frame.suffix_ids)]
    if 1 not in learnt:
        return BadRecord("no token of it is learnt; write an answer or remove the record")
    prompt = learnt.index(1)
    answer = [*learnt, 0].index(0, prompt) - prompt
    room = TokenBudget(settings.max_length, settings.max_prompt_length, len(start))
    kept = room.truncate(prompt, answer, lambda: min(prompt + written - get_last_turn_start(), prompt))
    if isinstance(kept, BadRecord):
        return kept
    last = len(ids) - learnt[::-1].index(1)  # behind it nothing is learnt
    span = slice(prompt - kept.prompt_tokens, min(last, prompt + kept.remaining_tokens))
    cuts = {**kept.cuts, "response_cut": int(span.stop < last)}
    return _finish_example(start + ids[span], [0] * len(start) + learnt[span], cuts)


def _finish_example(ids: list[int], loss_mask: list[int], cuts: dict[str, int]) -> dict[str, Any] | BadRecord:
    """The columns. The first token is nobody's target, and what the cut leaves behind the last answer goes too."""
    loss_mask = [0, *loss_mask[1:]]
    if 1 not in loss_mask:
        return BadRecord("one token is all it becomes, and the first is predicted from nothing; write more")
    last = len(ids) - loss_mask[::-1].index(1)
    return {"input_ids": ids[:last], "learnt": loss_mask[:last], **cuts}
