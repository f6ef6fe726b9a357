"""Conversations and prompts to tokens, answers marked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL, RenderedSample, render_sample
from dstrain.data.encoding.rendering import (
    PlaceholderExpansion,
    RenderedPrompt,
    Shifts,
    has_chat_template,
    keep_system_text,
    render_prompt,
    shift_offset,
    shift_spans,
)
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
from dstrain.data.formats.conversations import Conversation, ParsedPrompt, PromptCompletion, Sample
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message, common_prefix_length
from dstrain.data.formats.preferences import Prompt
from dstrain.data.records import BadRecord, encode_valid, try_parse
from dstrain.data.series import Patches, insert_soft_tokens
from dstrain.data.vision.image_io import read_image, resolve_image
from dstrain.data.vision.processor import VisionProcessor


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """Settings for the encoding of conversations."""

    max_length: int
    """Tokens of a whole conversation."""
    max_prompt_length: int | None = None
    """Tokens before the first answer, including the BOS."""
    assistant_only: bool = True
    """True to train on the answers only, False to train on every token."""
    with_thinking: bool = True
    """False to leave the thoughts of answers out of what is trained on."""


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
    """Return `input_ids` of each sample and `loss_mask`, its loss mask of the same length.

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


def encode_answers(
    tokenizer: Any,
    samples: Sequence[Sample],
    accepted: Sequence[Sequence[str]],
    config: EncodingConfig,
    expansion: PlaceholderExpansion | None = None,
) -> list[dict[str, Any] | BadRecord]:
    """Return `encode_conversations` with two columns for the comparison of generated answers.

    `answers`: the accepted answers of each sample as UTF-8 bytes of JSON; `prompt_length`: the tokens before its answer.
    """
    examples = encode_conversations(tokenizer, samples, config, expansion)
    spans = examples
    if not (config.assistant_only and config.with_thinking):  # then the loss mask does not say where the prompt ends
        whole = replace(config, assistant_only=True, with_thinking=True)
        spans = encode_conversations(tokenizer, samples, whole, expansion)
    found: list[dict[str, Any] | BadRecord] = []
    for example, span, texts in zip(examples, spans, accepted, strict=True):
        if isinstance(example, BadRecord) or isinstance(span, BadRecord):
            found.append(example if isinstance(example, BadRecord) else span)
            continue
        answers = [*json.dumps(texts, ensure_ascii=False).encode()]
        found.append({**example, "answers": answers, "prompt_length": float([*span["loss_mask"]].index(1))})
    return found


def read_answers(example: Mapping[str, Any]) -> list[str]:
    """Return the accepted answers of an example of `encode_answers`."""
    answers: list[str] = json.loads(bytes(int(byte) for byte in example["answers"]))
    return answers


def _render(encoder: _SampleEncoder, index: int, sample: Sample) -> _ExpandedSample:
    """Render a sample. Raises BadRecord."""
    if isinstance(sample, Conversation):
        messages = keep_system_text(encoder.tokenizer, sample.messages, sample.trained_turns[-1])
        removed = len(sample.messages) - len(messages)
        sample = replace(sample, messages=messages, trained_turns=tuple(at - removed for at in sample.trained_turns))
    config = encoder.config
    rendered = render_sample(encoder.tokenizer, sample, encoder.end_tokens, config.assistant_only, config.with_thinking)
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
    return {"input_ids": ids[:last], "loss_mask": loss_mask[:last], **cuts}


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    text: str
    """The text before truncation; each image is its image token."""
    ids: list[int]
    images: tuple[Any, ...] = ()
    """Arguments for `dstrain.data.vision.image_io.read_image`, or `ImageEntry`s, in the order of the image tokens."""
    series: Patches | None = None
    """Time series whose soft tokens are in the ids."""
    prompt: Prompt = ""
    """The prompt as it was read: a text, or messages."""


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[ParsedPrompt],
    max_length: int | None = None,
    expansion: PlaceholderExpansion | None = None,
) -> list[EncodedPrompt | BadRecord]:
    """Return each prompt as text and ids, rendered as in training.

    `max_length`: tokens of a prompt; a longer one loses the tokens after its BOS. `expansion`: the
    images of the prompts.
    """
    encoder = _PromptEncoder(tokenizer, get_special_tokens(tokenizer), max_length, expansion)
    return [try_parse(encoder.encode, *item) for item in enumerate(prompts)]


@dataclass(frozen=True)
class _PromptEncoder:
    """Tokenizer and limit of one call of `encode_prompts`."""

    tokenizer: Any
    special_tokens: SpecialTokens
    max_length: int | None
    expansion: PlaceholderExpansion | None

    def encode(self, index: int, prompt: ParsedPrompt) -> EncodedPrompt:
        """Return prompt `index` as text and ids. Raises BadRecord."""
        rendered = render_prompt(self.tokenizer, prompt.prompt, (), prompt.tools)
        if self.expansion is None:
            text, ids = rendered.prompt, self._tokenize_and_truncate(rendered)
        else:
            image_token = self.expansion.vision_processor.image_token
            text = rendered.prompt.replace(IMAGE_PLACEHOLDER, image_token)
            expanded, _ = self.expansion.expand(index, rendered.prompt)
            ids = self._tokenize_and_truncate(replace(rendered, prompt=expanded))
            # max_length is what generation leaves for the prompt, not a key of the recipe.
            limit = f"the room for a prompt, {self.max_length} tokens,"
            checked = self.expansion.check_truncation(index, {"input_ids": ids}, limit)
            if isinstance(checked, BadRecord):
                raise checked
        if prompt.series is not None:
            ids = insert_soft_tokens(self.tokenizer, ids, prompt.series.num_tokens)
        if not ids:
            raise BadRecord("the prompt becomes no token; write one")
        return EncodedPrompt(text, ids, series=prompt.series, prompt=prompt.prompt)

    def _tokenize_and_truncate(self, rendered: RenderedPrompt) -> list[int]:
        ids = tokenize(self.tokenizer, [rendered.prompt])[0]
        special = self.special_tokens.for_template(rendered.used_chat_template, self.expansion is not None)
        prefix, body = split_bos(ids, special)
        keep = len(body)
        if self.max_length is not None:
            keep = min(keep, max(self.max_length - len(prefix), 0))
        # From the left, as in training: the last turn and the opening of the answer remain.
        return prefix + body[len(body) - keep :]


def encode_image_prompts(
    vision_processor: VisionProcessor,
    parsed_prompts: Sequence[RecordWithImages[ParsedPrompt]],
    folders: Sequence[Path],
    max_length: int | None = None,
) -> list[EncodedPrompt | BadRecord]:
    """Return the prompts with their images, or a BadRecord where one of the images cannot be used."""
    loaded = [_load_prompt(vision_processor, *one) for one in zip(parsed_prompts, folders, strict=True)]
    return encode_valid(loaded, partial(_encode_loaded_prompts, vision_processor, max_length))


LoadedPrompt = tuple[ParsedPrompt, tuple[Path | bytes, ...], list[str]]
"""A prompt, its images, and the text that stands for each of them."""


def _encode_loaded_prompts(
    vision_processor: VisionProcessor, max_length: int | None, items: list[LoadedPrompt]
) -> list[EncodedPrompt | BadRecord]:
    expansion = PlaceholderExpansion(vision_processor, [texts for _, _, texts in items])
    prompts = [prompt for prompt, _, _ in items]
    encoded = encode_prompts(vision_processor.tokenizer, prompts, max_length, expansion)
    return [
        prompt if isinstance(prompt, BadRecord) else replace(prompt, images=images)
        for prompt, (_, images, _) in zip(encoded, items, strict=True)
    ]


def _load_prompt(
    vision_processor: VisionProcessor, parsed_prompt: RecordWithImages[ParsedPrompt], folder: Path
) -> LoadedPrompt | BadRecord:
    """Locate the images of a prompt and make their texts."""
    try:
        images = tuple(resolve_image(value, folder) for value in parsed_prompt.images)
        return (
            parsed_prompt.parsed,
            images,
            [vision_processor.get_image_text(read_image(image).size) for image in images],
        )
    except BadRecord as fault:
        return fault


def stop_token_ids(tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: EOS, and what the chat template writes after an answer."""
    found = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    return found | _ids_after_answer(tokenizer)


def _ids_after_answer(tokenizer: Any) -> set[int]:
    """Return the special id that the chat template writes after an answer; empty if it writes none."""
    try:
        question: Message = {"role": "user", "content": "question"}
        rendered = render_prompt(tokenizer, [question], [ANSWER_SENTINEL])
    except BadRecord:  # a template that requires more than a question
        return set()
    tail = rendered.answers[0].rpartition(ANSWER_SENTINEL)[2].lstrip()
    special = set(tokenizer.get_added_vocab().values())
    ids = tokenize(tokenizer, [tail])[0] if tail else []
    return {int(token) for token in ids[:1] if token in special}


def describe_missing_end(tokenizer: Any) -> list[str]:
    """Return a warning where the chat template writes no token after an answer that could end it."""
    if not has_chat_template(tokenizer) or _ids_after_answer(tokenizer):
        return []
    return [
        "the chat template writes no special token after an answer: the model learns answers without an end, and may not "
        "stop when it generates; name another template with model.chat_template"
    ]
