"""Images of a record: placeholders in its text, and records grouped by image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from dstrain.data.formats.answers import PromptAnswers
from dstrain.data.formats.conversations import (
    ANSWER_KEYS,
    Conversation,
    ParsedPrompt,
    PromptCompletion,
    read_conversation,
)
from dstrain.data.formats.messages import (
    IMAGE_KEYS,
    IMAGE_PART_TYPES,
    IMAGE_PLACEHOLDER,
    MESSAGES_KEYS,
    TEXT_KEYS,
    Message,
    get_turn_pair,
    is_null_image,
    iter_parts,
    json_type_name,
    read_images,
)
from dstrain.data.formats.preferences import Preference, to_chosen_rejected
from dstrain.data.records import Record, as_record, nan_to_null
from dstrain.data.sources.base import Source, WrappedSource
from dstrain.errors import BadRecord

# While a record is parsed, numbered placeholders (<image2>) are characters of their own, so that
# parsers see plain text; image k of the record, counted from 1, is the character _INDEXED_BASE + k.
_INDEXED_BASE = 0xE100
# Larger numbers are clamped, and then reported as out of range.
_MAX_NUMBER = 255
_PLACEHOLDER_PATTERN = re.compile(r"<image(\d{0,3})>")
_IMAGE_CHAR_PATTERN = re.compile(f"[{IMAGE_PLACEHOLDER}{chr(_INDEXED_BASE)}-{chr(_INDEXED_BASE + _MAX_NUMBER)}]")

_ANSWERED_KEYS = frozenset((*MESSAGES_KEYS, "chosen", *ANSWER_KEYS.values()))
"""Keys of an answer, beside which a caption is none."""

ParsedT = TypeVar(
    "ParsedT",
    Conversation,
    PromptCompletion,
    Preference,
    ParsedPrompt,
    PromptAnswers,
    Conversation | PromptCompletion,
)


@dataclass(frozen=True)
class RecordWithImages(Generic[ParsedT]):
    """A parsed record and its images, in the order of their placeholders in the text."""

    parsed: ParsedT
    """Its texts contain IMAGE_PLACEHOLDER for each image."""
    images: tuple[Any, ...] = ()
    """Values from the record: paths, or mappings with bytes."""


def read_with_images(
    record: Mapping[str, Any], read: Callable[[Mapping[str, Any]], ParsedT]
) -> RecordWithImages[ParsedT]:
    """Parse a record's text with `read` and match its placeholders to its images.

    Records write `<image>`, or `<image1>` with a number, or typed parts of a message's content;
    without any placeholder the images come first. Raises BadRecord if images and placeholders do
    not match.
    """
    record = nan_to_null(record)
    images = read_images(record)
    inline: list[Any] = []
    texts = {key: _encode_placeholders(value, inline) for key, value in record.items() if key not in IMAGE_KEYS}
    if images and inline:
        raise BadRecord("images are given both in parts of messages and under 'images'; keep one of them")
    parsed = read(_caption_to_messages(to_chosen_rejected(record.derive(texts))))
    # After parsing: only there is it known which texts belong to prompts.
    found = [char for text in _prompt_texts(parsed) for char in _IMAGE_CHAR_PATTERN.findall(text)]
    if any(_IMAGE_CHAR_PATTERN.search(text) for text in _answer_texts(parsed)):
        raise BadRecord("an answer contains an image placeholder, and only questions can contain images; move it")
    # Images are either under a key or in the parts, so one of the lists is empty.
    images = images or inline
    if images and not found:
        parsed, found = _prepend_images(parsed, len(images)), [IMAGE_PLACEHOLDER] * len(images)
    order = _image_order(found, len(images))
    return RecordWithImages(
        _map_prompt_texts(parsed, lambda text: _IMAGE_CHAR_PATTERN.sub(IMAGE_PLACEHOLDER, text)),
        tuple(images[at] for at in order),
    )


def has_null_image(record: Mapping[str, Any], key: str) -> bool:
    """Return whether the record has null under an image key."""
    return key in record and record[key] != [] and is_null_image(record[key])


def _encode_placeholders(value: Any, inline_images: list[Any]) -> Any:
    """Return the value with characters for placeholders and image parts.

    The images of the parts are appended to `inline_images`.
    """
    if isinstance(value, str):
        return _PLACEHOLDER_PATTERN.sub(
            lambda found: _indexed_char(int(found[1])) if found[1] else IMAGE_PLACEHOLDER, value
        )
    if isinstance(value, list):
        return [_encode_placeholders(item, inline_images) for item in value]
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        return {
            key: _encode_content(item, inline_images) if key in ("content", "value") else item
            for key, item in value.items()
        }
    # Turns of a question and its answer, and OpenAI's `input` of a preference.
    if isinstance(value, Mapping) and (get_turn_pair(value) or "messages" in value):
        return {key: _encode_placeholders(item, inline_images) for key, item in value.items()}
    return value


def _encode_content(value: Any, inline_images: list[Any]) -> Any:
    """Return a message's content with its image parts as text parts."""
    if not isinstance(value, list):
        return _encode_placeholders(value, inline_images)
    return [
        {"type": "text", "text": _encode_image_part(part, inline_images)}
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PART_TYPES
        else {
            key: _encode_placeholders(item, inline_images) if key in TEXT_KEYS else item for key, item in part.items()
        }
        if isinstance(part, Mapping)
        else part
        for part in value
    ]


def _encode_image_part(part: Mapping[str, Any], inline_images: list[Any]) -> str:
    if part.get("text"):
        raise BadRecord(f"a part of type {part['type']!r} has a 'text' too; write two parts")
    held = next(
        (part[key] for key in ("image", "image_url", "path", "url", "value") if part.get(key) is not None), None
    )
    if isinstance(held, Mapping) and "url" in held:
        held = held["url"]
    if held is None:
        index = part.get("index")
        return IMAGE_PLACEHOLDER if not isinstance(index, int) or index < 0 else _indexed_char(index + 1)
    # Two parts with the same image are two placeholders of one image.
    if held not in inline_images:
        inline_images.append(held)
    return _indexed_char(inline_images.index(held) + 1)


def _indexed_char(number: int) -> str:
    """Return the character of image `number`, counted from 1."""
    return chr(_INDEXED_BASE + min(number, _MAX_NUMBER))


def _caption_to_messages(record: Record) -> Record:
    """Return a record with a caption as a question, empty unless given, and the caption as answer.

    A record that has an answer of its own is returned as it is.
    """
    if "caption" not in record.present or record.present.intersection(_ANSWERED_KEYS):
        return record
    if not isinstance(record["caption"], str):
        raise BadRecord(f"'caption' is {json_type_name(record['caption'])}, not text; write a string")
    key = next((key for key in ("question", "prompt") if key in record.present and record[key]), "")
    turns = [
        {"role": "user", "content": record[key] if key else ""},
        {"role": "assistant", "content": record["caption"]},
    ]
    return record.derive({**record.without("caption", "question", "prompt"), "messages": turns})


def _image_order(placeholders: list[str], count: int) -> list[int]:
    """Return the image index of each placeholder. Raises BadRecord if the counts differ."""
    # Index of the image; placeholders without a number are counted in order instead.
    numbers = [ord(char) - _INDEXED_BASE - 1 for char in placeholders if char != IMAGE_PLACEHOLDER]
    # A mixture has no order that could be meant for certain.
    if numbers and len(numbers) < len(placeholders):
        raise BadRecord("some image placeholders are numbered (<image1>) and some are not; number all or none")
    there = f"{count} image{'s' * (count != 1)}"
    if numbers:
        if wrong := [number + 1 for number in numbers if not 0 <= number < count]:
            raise BadRecord(f"<image{wrong[0]}> is used, and there are {there}; add the image, or correct the number")
        if missing := sorted(set(range(count)) - set(numbers)):
            raise BadRecord(
                f"image {missing[0] + 1} of {count} has no placeholder; write <image{missing[0] + 1}>, or remove it"
            )
        return numbers
    if len(placeholders) != count:
        few = "more" if len(placeholders) > count else "fewer"
        raise BadRecord(
            f"{len(placeholders)} placeholder{'s' * (len(placeholders) != 1)} (<image>) and {there}: {few} placeholders "
            "than images; write one placeholder for each image"
        )
    return [*range(count)]


def _prompt_texts(parsed: Any) -> list[str]:
    """Return the texts that may contain images."""
    if isinstance(parsed, Conversation):
        return [turn["content"] for turn in parsed.messages if turn["role"] != "assistant"]
    return [*iter_parts(parsed.prompt)]


def _answer_texts(parsed: Any) -> list[str]:
    if isinstance(parsed, PromptCompletion):
        return [parsed.answer]
    if isinstance(parsed, Conversation):
        return [turn["content"] for turn in parsed.messages if turn["role"] == "assistant"]
    return [*iter_parts(parsed.chosen, parsed.rejected)] if isinstance(parsed, Preference) else []


def _prepend_images(parsed: Any, count: int) -> Any:
    """Put placeholders in front of the first user text. Raises BadRecord if there is no user turn."""
    done = False

    def prepend_once(text: str) -> str:
        nonlocal done
        before, done = "" if done else IMAGE_PLACEHOLDER * count, True
        return before + ("\n" if before and text and not text.startswith("\n") else "") + text

    if isinstance(getattr(parsed, "prompt", None), str):
        return replace(parsed, prompt=prepend_once(parsed.prompt))
    changed = _map_messages(
        parsed, lambda turn: {**turn, "content": prepend_once(turn["content"])} if turn["role"] == "user" else turn
    )
    if not done:
        raise BadRecord("there is no user's turn to put the images into; write one")
    return changed


def _map_prompt_texts(parsed: Any, transform: Callable[[str], str]) -> Any:
    """Return the parsed record with every text that may contain images transformed."""
    if isinstance(getattr(parsed, "prompt", None), str):
        return replace(parsed, prompt=transform(parsed.prompt))
    return _map_messages(parsed, lambda turn: {**turn, "content": transform(turn["content"])})


def _map_messages(parsed: Any, transform: Callable[[Message], Any]) -> Any:
    name = "messages" if isinstance(parsed, Conversation) else "prompt"
    return replace(parsed, **{name: [transform(turn) for turn in getattr(parsed, name)]})


class GroupByImageSource(WrappedSource):
    """A source whose consecutive records with the same images are one record."""

    def __init__(self, source: Source) -> None:
        super().__init__([source], hashlib.sha256(f"{source.digest} grouped by image".encode()).hexdigest())
        self._source = source

    @cached_property
    def _group_starts(self) -> list[int]:
        """Index of the first record of each group; computing it reads every record."""
        starts: list[int] = []
        last: Any = None
        for index in range(len(self._source)):
            images = _images_to_group(self._source[index])
            # None: a record that cannot be merged is a group of its own.
            if images is None or images != last:
                starts.append(index)
            last = images
        return starts

    def __len__(self) -> int:
        return len(self._group_starts)

    def find_source(self, index: int) -> tuple[Source, int]:
        """Return the source and the index of the group's first record."""
        # Group 0 starts at record 0: its place is known without reading all records.
        return self._source, self._group_range(index)[0] if index else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = self._group_range(index)
        # A single record stays as it is, in its own form.
        if end == start + 1:
            return self._source[start]
        messages: list[Any] = []
        columns: dict[str, Any] = {}
        used: dict[str, str] = {}
        for at in range(start, end):
            record = as_record(self._source[at])
            parsed = read_with_images(record, _read_as_conversation).parsed
            # The images are shown once, in front of the first question.
            messages += parsed.messages if at == start else [_remove_placeholders(turn) for turn in parsed.messages]
            columns |= {name: value for name, value in record.columns.items() if value is not None}
            used |= record.used
        grouped = Record({"messages": messages, "images": list(_images_to_group(self._source[start]) or ())})
        grouped.columns, grouped.used = columns, used
        return grouped

    def _group_range(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._group_starts[index], [*self._group_starts[index + 1 : index + 2], len(self._source)][0]


def _images_to_group(record: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the record's images; None for a record that is not merged with others.

    These have no image, tools or roles other than user and assistant, or cannot be read.
    """
    try:
        found = read_with_images(record, _read_as_conversation)
    except BadRecord:
        return None
    roles = {turn["role"] for turn in found.parsed.messages}
    plain = not found.parsed.tools and roles == {"user", "assistant"}
    return found.images if found.images and plain else None


def _read_as_conversation(record: Mapping[str, Any]) -> Conversation:
    sample = read_conversation(record)
    return sample if isinstance(sample, Conversation) else sample.to_conversation()


def _remove_placeholders(message: Any) -> dict[str, Any]:
    return {**message, "content": message["content"].replace(IMAGE_PLACEHOLDER, "").strip("\n")}
