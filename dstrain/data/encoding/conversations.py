"""Conversations and prompts to tokens, answers marked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL, RenderedSample, render_sample
from dstrain.data.encoding.chat_template import has_chat_template
from dstrain.data.encoding.rendered_text import Rendered, find_template_marks
from dstrain.data.encoding.rendering import (
    Encoder,
    EncodingConfig,
    PlaceholderExpansion,
    Shifts,
    TokenBudget,
    count_tokens_before,
    find_last_turn,
    get_special_tokens,
    has_suffix,
    keep_system_text,
    render_prompt,
    shift_offset,
    shift_spans,
    split_bos,
    tokenize,
    tokenize_with_offsets,
)
from dstrain.data.encoding.template_check import RENDERED
from dstrain.data.formats.conversations import Conversation, ParsedPrompt, Sample, SoftInputs
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message, common_prefix_length
from dstrain.data.formats.preferences import Prompt
from dstrain.data.records import encode_valid, try_parse
from dstrain.data.vision.images import read_image, resolve_image
from dstrain.data.vision.processor import VisionProcessor
from dstrain.errors import BadRecord
from dstrain.files import parse_json


def encode_conversations(
    tokenizer: Any, samples: Sequence[Sample], config: EncodingConfig, expansion: PlaceholderExpansion | None = None
) -> list[dict[str, Any] | BadRecord]:
    """Return `input_ids` of each sample and `loss_mask`, its loss mask of the same length.

    The mask is 1 where a token is a target, which an image token never is. `prompt_cut`,
    `response_cut` and `last_turn_cut` are 1 if something was truncated, else 0. `expansion`: the
    images of the samples. Raises DataError if max_length leaves no room for text.
    """
    return Encoder(tokenizer, config, expansion).encode(samples, _render, _encode_rendered)


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
    answers: list[str] = parse_json(bytes(int(byte) for byte in example["answers"]))
    return answers


@dataclass(frozen=True)
class _ExpandedSample:
    """A sample as text, before and after its image placeholders were expanded."""

    sample: Sample
    text: str
    expanded: RenderedSample
    shifts: Shifts


def _render(encoder: Encoder, index: int, sample: Sample) -> _ExpandedSample:
    """Render a sample. Raises BadRecord."""
    if isinstance(sample, Conversation):
        messages = keep_system_text(encoder.tokenizer, sample.messages, sample.trained_turns[-1])
        removed = len(sample.messages) - len(messages)
        sample = replace(sample, messages=messages, trained_turns=tuple(at - removed for at in sample.trained_turns))
    config = encoder.config
    rendered = render_sample(encoder.tokenizer, sample, config.assistant_only, config.with_thinking, config.rendered)
    text, shifts = encoder.expand(index, rendered.text)
    spans = shift_spans(rendered.trained_spans, shifts)
    return _ExpandedSample(sample, rendered.text, replace(rendered, text=text, trained_spans=spans), shifts)


def _encode_rendered(encoder: Encoder, items: list[_ExpandedSample]) -> list[dict[str, Any] | BadRecord]:
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


def _tokens_before_last_turn(encoder: Encoder, item: _ExpandedSample, ids: list[int]) -> int:
    """Return how many ids come before the last user turn in front of the first trained answer."""
    sample, start = item.sample, 0
    if item.expanded.lost[RENDERED]:
        prompt = item.text[: item.expanded.trained_spans[0][0]]
        start = find_template_marks(encoder.tokenizer).find_last_question(prompt)
    elif isinstance(sample, Conversation):
        num_prompt = sample.trained_turns[0]
        start = find_last_turn(encoder.tokenizer, sample.messages, num_prompt, item.text, tools=sample.tools)
    elif item.text.startswith(sample.prompt):  # else a template made a user turn of it
        start = find_last_turn(encoder.tokenizer, sample.prompt, 0, item.text)
    return count_tokens_before(encoder.tokenizer, item.expanded.text, ids, shift_offset(start, item.shifts))


def _build_example(
    encoder: Encoder, item: _ExpandedSample, all_ids: list[int], all_mask: list[int]
) -> dict[str, Any] | BadRecord:
    """Add special tokens and truncate: first the text before the first answer from the left, then the end.

    The first token is not a target, because there is nothing to predict it from. Tokens after the last target are left
    out.
    """
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
    last = _end_of_targets(mask)
    span = slice(prompt - fit.prompt_tokens, min(last, prompt + fit.remaining_tokens))
    input_ids, loss_mask = prefix + ids[span], [0, *[*[0] * len(prefix), *mask[span]][1:]]
    if 1 not in loss_mask:
        return BadRecord(
            "the text is a single token, so there is no target to train on; write a longer text or remove the record"
        )
    end = _end_of_targets(loss_mask)
    cuts = {**fit.cuts, "response_cut": int(span.stop < last), **item.expanded.lost}
    return {"input_ids": input_ids[:end], "loss_mask": loss_mask[:end], **cuts}


def _end_of_targets(mask: list[int]) -> int:
    return len(mask) - mask[::-1].index(1)


SOFT_TOKEN_ID = -1
"""Placeholder of a soft token in input ids. No tokenizer has it, so no vocabulary has to be extended."""


def insert_soft_tokens(tokenizer: Any, ids: Sequence[int], count: int) -> list[int]:
    """Return the ids with placeholders of soft tokens at the start, after the BOS."""
    first = 1 if ids and ids[0] == tokenizer.bos_token_id else 0
    return [*ids[:first], *[SOFT_TOKEN_ID] * count, *ids[first:]]


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    text: str
    """The text before truncation; each image is its image token."""
    ids: list[int]
    images: tuple[Any, ...] = ()
    """Arguments for `dstrain.data.vision.images.read_image`, or `ImageEntry`s, in the order of the image tokens."""
    soft_inputs: SoftInputs | None = None
    """Inputs whose soft tokens are in the ids."""
    prompt: Prompt = ""
    """The prompt as it was read: a text, or messages."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the assistant may call."""
    is_cut: bool = False
    """True if the ids lack the beginning of the text."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """TEMPLATE_COLUMNS of the prompt."""


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[ParsedPrompt],
    max_length: int | None = None,
    expansion: PlaceholderExpansion | None = None,
    rendered_texts: Rendered = "auto",
) -> list[EncodedPrompt | BadRecord]:
    """Return each prompt as text and ids, rendered as in training.

    `max_length`: tokens of a prompt; a longer one loses the tokens after its BOS. `expansion`: the
    images of the prompts. `rendered_texts`: data.rendered.
    """
    special_tokens = get_special_tokens(tokenizer)

    def encode(index: int, prompt: ParsedPrompt) -> EncodedPrompt:
        """Return prompt `index` as text and ids. Raises BadRecord."""
        rendered = render_prompt(tokenizer, prompt.prompt, (), prompt.tools, rendered_texts)
        text = expanded = rendered.prompt
        if expansion is not None:
            text = text.replace(IMAGE_PLACEHOLDER, expansion.vision_processor.image_token)
            expanded, _ = expansion.expand(index, expanded)
        special = special_tokens.for_template(rendered.used_chat_template, expansion is not None)
        prefix, body = split_bos(tokenize(tokenizer, [expanded])[0], special)
        keep = len(body) if max_length is None else min(len(body), max(max_length - len(prefix), 0))
        # From the left, as in training: the last turn and the opening of the answer remain.
        ids = prefix + body[len(body) - keep :]
        if expansion is not None:
            # max_length is what generation leaves for the prompt, not a key of the recipe.
            limit = f"the room for a prompt, {max_length} tokens,"
            checked = expansion.check_truncation(index, {"input_ids": ids}, limit)
            if isinstance(checked, BadRecord):
                raise checked
        if prompt.soft_inputs is not None:
            ids = insert_soft_tokens(tokenizer, ids, prompt.soft_inputs.num_tokens)
        if not ids:
            raise BadRecord("the prompt becomes no token; write one")
        return EncodedPrompt(
            text, ids, soft_inputs=prompt.soft_inputs, prompt=prompt.prompt, tools=prompt.tools, is_cut=keep < len(body),
            lost=rendered.lost,
        )  # fmt: skip

    return [try_parse(encode, *item) for item in enumerate(prompts)]


def encode_image_prompts(
    vision_processor: VisionProcessor,
    parsed_prompts: Sequence[RecordWithImages[ParsedPrompt]],
    folders: Sequence[Path],
    max_length: int | None = None,
    rendered_texts: Rendered = "auto",
) -> list[EncodedPrompt | BadRecord]:
    """Return the prompts with their images, or a BadRecord where one of the images cannot be used."""

    def load(
        parsed: RecordWithImages[ParsedPrompt], folder: Path
    ) -> tuple[ParsedPrompt, list[Path | bytes], list[str]]:
        images = [resolve_image(value, folder) for value in parsed.images]
        return parsed.parsed, images, [vision_processor.get_image_text(read_image(image).size) for image in images]

    def encode(items: list[tuple[ParsedPrompt, list[Path | bytes], list[str]]]) -> list[EncodedPrompt | BadRecord]:
        prompts, images, texts = zip(*items, strict=True) if items else ((), (), ())
        expansion = PlaceholderExpansion(vision_processor, texts)
        encoded = encode_prompts(vision_processor.tokenizer, prompts, max_length, expansion, rendered_texts)
        return [
            one if isinstance(one, BadRecord) else replace(one, images=tuple(shown))
            for one, shown in zip(encoded, images, strict=True)
        ]

    return encode_valid([try_parse(load, *one) for one in zip(parsed_prompts, folders, strict=True)], encode)


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
