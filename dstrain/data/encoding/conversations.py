"""Encoding of conversations as token ids with a loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dstrain.data.encoding.answer_spans import RenderedSample, render_sample
from dstrain.data.encoding.rendering import PlaceholderExpansion, Shifts, keep_system_text, shift_offset, shift_spans
from dstrain.data.encoding.tokenization import (
    LastTurnFinder,
    SpecialTokens,
    TokenBudget,
    count_tokens_before,
    describe_limits,
    get_special_tokens,
    has_suffix,
    split_bos,
    tokenize,
    tokenize_with_offsets,
)
from dstrain.data.formats.conversations import Conversation, PromptCompletion, Sample
from dstrain.data.formats.messages import common_prefix_length
from dstrain.data.records import BadRecord, encode_valid, try_parse


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """Settings for the encoding of conversations."""

    max_length: int
    """Tokens of a whole conversation."""
    max_prompt_length: int | None = None
    """Tokens before the first answer, including the BOS."""
    assistant_only: bool = True
    """True to train on the answers only, False to train on every token."""


@dataclass(frozen=True)
class _ExpandedSample:
    """A sample as text, before and after its image placeholders were expanded."""

    sample: Sample
    text: str
    expanded: RenderedSample
    shifts: Shifts = ()


@dataclass(frozen=True)
class _SampleEncoder:
    """Tokenizer and settings of one call of `encode_conversations`."""

    tokenizer: Any
    end_tokens: tuple[str, ...]
    special_tokens: SpecialTokens
    config: EncodingConfig
    expansion: PlaceholderExpansion | None


def encode_conversations(
    tokenizer: Any, samples: Sequence[Sample], config: EncodingConfig, expansion: PlaceholderExpansion | None = None
) -> list[dict[str, Any] | BadRecord]:
    """Return `input_ids` of each sample and `learnt`, its loss mask of the same length.

    The mask is 1 where a token is a target, which an image token never is. `prompt_cut`,
    `response_cut` and `last_turn_cut` are 1 if something was truncated, else 0. `expansion`: the
    images of the samples. Raises DataError if max_length leaves no room for text.
    """
    special_tokens = get_special_tokens(tokenizer)
    special_tokens.check_max_length(config.max_length)
    # Any added token may end a turn: templates do not say which one does.
    end_tokens = tuple(tokenizer.get_added_vocab())
    encoder = _SampleEncoder(tokenizer, end_tokens, special_tokens, config, expansion)
    rendered = [try_parse(_render, encoder, *item) for item in enumerate(samples)]
    examples = encode_valid(rendered, lambda items: _encode_rendered(encoder, items))
    if expansion is None:
        return examples
    limits = describe_limits(config.max_length, config.max_prompt_length)
    return [expansion.check_truncation(at, item, limits) for at, item in enumerate(examples)]


def _render(encoder: _SampleEncoder, index: int, sample: Sample) -> _ExpandedSample:
    """Render a sample. Raises BadRecord."""
    if isinstance(sample, Conversation):
        messages = keep_system_text(encoder.tokenizer, sample.messages, sample.trained_turns[-1])
        removed = len(sample.messages) - len(messages)
        sample = replace(sample, messages=messages, trained_turns=tuple(at - removed for at in sample.trained_turns))
    rendered = render_sample(encoder.tokenizer, sample, encoder.end_tokens, encoder.config.assistant_only)
    if encoder.expansion is None:
        return _ExpandedSample(sample, rendered.text, rendered)
    text, shifts = encoder.expansion.expand(index, rendered.text)
    spans = shift_spans(rendered.trained_spans, shifts)
    return _ExpandedSample(sample, rendered.text, replace(rendered, text=text, trained_spans=spans), shifts)


def _encode_rendered(encoder: _SampleEncoder, items: Sequence[_ExpandedSample]) -> list[dict[str, Any] | BadRecord]:
    tokenized = _tokenize_samples([item.expanded for item in items], encoder.tokenizer)
    examples = []
    for item, (ids, mask) in zip(items, tokenized, strict=True):
        if encoder.expansion is not None:
            mask = encoder.expansion.mask_image_tokens(ids, mask)
        examples.append(_build_example(encoder, item, ids, mask))
    return examples


def _tokenize_samples(rendered: Sequence[RenderedSample], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids of each text and a mask of the tokens with at least one trained character."""
    if not tokenizer.is_fast:
        yield from (_tokenize_without_offsets(item, tokenizer) for item in rendered)
        return
    tokenized = tokenize_with_offsets(tokenizer, [item.text for item in rendered])
    for item, (ids, starts, ends) in zip(rendered, tokenized, strict=True):
        mask = np.zeros(len(ids), dtype=np.int64)
        for start, end in item.trained_spans:
            # A token with a part of the answer counts as the answer's.
            mask |= (starts < end) & (ends > start)
        yield ids, mask.tolist()


def _tokenize_without_offsets(rendered: RenderedSample, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return ids and mask from a slow tokenizer, which reports no offsets.

    A span covers the tokens from the first that differs when the text is cut at the span's start.
    """

    def encode(text: str) -> list[int]:
        return tokenize(tokenizer, [text])[0]

    def count(end: int) -> int:
        return common_prefix_length([ids, encode(rendered.text[:end])])

    ids = encode(rendered.text)
    mask = [0] * len(ids)
    for start, end in rendered.trained_spans:
        for at in range(count(start), len(ids) if end == len(rendered.text) else count(end)):
            mask[at] = 1
    return ids, mask


def _tokens_before_last_turn(encoder: _SampleEncoder, item: _ExpandedSample, ids: list[int]) -> int:
    """Return how many ids come before the last user turn in front of the first trained answer."""
    sample = item.sample
    if isinstance(sample, PromptCompletion):
        start = LastTurnFinder(encoder.tokenizer, sample.prompt, 0).find_last_turn(item.text)
        if not item.text.startswith(sample.prompt):  # a template made a user turn of it
            start = 0
    else:
        num_prompt = sample.trained_turns[0]
        finder = LastTurnFinder(encoder.tokenizer, sample.messages, num_prompt, False, sample.tools)
        start = finder.find_last_turn(item.text)
    if item.shifts:
        start = shift_offset(start, item.shifts)
    return count_tokens_before(encoder.tokenizer, item.expanded.text, ids, start)


def _build_example(
    encoder: _SampleEncoder, item: _ExpandedSample, all_ids: list[int], all_mask: list[int]
) -> dict[str, Any] | BadRecord:
    """Add special tokens and truncate: first the text before the first answer from the left, then the end."""
    templated, config = item.expanded.used_chat_template, encoder.config
    special = encoder.special_tokens.for_template(templated, encoder.expansion is not None)
    prefix, ids = split_bos(all_ids, special)
    rendered_prefix = len(all_mask) - len(ids)  # 0 unless the text itself starts with the BOS
    mask = all_mask[rendered_prefix:]
    if not templated and not has_suffix(ids, list(special.suffix_ids)):
        ids, mask = [*ids, *special.suffix_ids], [*mask, *(1 for _ in special.suffix_ids)]
    if 1 not in mask:
        return BadRecord("no token of it is trained on; write an answer or remove the record")
    prompt = mask.index(1)
    # Only the first answer competes with the prompt for room; later turns are cut first.
    answer = [*mask, 0].index(0, prompt) - prompt
    budget = TokenBudget(config.max_length, config.max_prompt_length, len(prefix))

    def count_last_turn() -> int:
        before = _tokens_before_last_turn(encoder, item, all_ids)
        return min(prompt + rendered_prefix - before, prompt)

    fit = budget.truncate(prompt, answer, count_last_turn)
    if isinstance(fit, BadRecord):
        return fit
    last = len(ids) - mask[::-1].index(1)  # there are no targets after it
    span = slice(prompt - fit.prompt_tokens, min(last, prompt + fit.remaining_tokens))
    cuts = {**fit.cuts, "response_cut": int(span.stop < last), **item.expanded.lost}
    return _finish_example(prefix + ids[span], [0] * len(prefix) + mask[span], cuts)


def _finish_example(ids: list[int], loss_mask: list[int], cuts: dict[str, int]) -> dict[str, Any] | BadRecord:
    """Return the columns, without the tokens after the last target.

    The first token is not a target, because there is nothing to predict it from.
    """
    loss_mask = [0, *loss_mask[1:]]
    if 1 not in loss_mask:
        return BadRecord(
            "the text is a single token, so there is no target to train on; write a longer text or remove the record"
        )
    last = len(ids) - loss_mask[::-1].index(1)
    return {"input_ids": ids[:last], "learnt": loss_mask[:last], **cuts}
