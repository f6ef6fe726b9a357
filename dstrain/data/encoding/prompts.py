"""Encoding of generation prompts, with images too, and the token ids that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL
from dstrain.data.encoding.rendering import PlaceholderExpansion, RenderedPrompt, has_chat_template, render_prompt
from dstrain.data.encoding.tokenization import SpecialTokens, get_special_tokens, split_bos, tokenize
from dstrain.data.formats.image_placeholders import RecordWithImages
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message
from dstrain.data.formats.prompts import ParsedPrompt
from dstrain.data.records import BadRecord, encode_valid, try_parse
from dstrain.data.series.patches import Patches, insert_soft_tokens
from dstrain.data.vision.image_io import read_image, resolve_image
from dstrain.data.vision.processor import VisionProcessor


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
        return EncodedPrompt(text, ids, series=prompt.series)

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
