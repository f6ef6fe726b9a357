"""Records about one image as one: its questions become the turns of one conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dstrain.data.formats.conversations import Conversation, Sample, read_conversation
from dstrain.data.formats.image_placeholders import read_with_images
from dstrain.data.formats.transcripts import IMAGE_PLACEHOLDER
from dstrain.data.records import BadRecord, BadRow
from dstrain.data.sources.base import Source


class GroupByImageSource:
    """A source whose records that follow one another with the same images are one record."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.digest = hashlib.sha256(f"{source.digest} grouped by image".encode()).hexdigest()

    @property
    def bad_rows(self) -> list[BadRow]:
        return self._source.bad_rows

    @cached_property
    def _group_starts(self) -> list[int]:
        """Where each group begins: every record is read for it."""
        starts: list[int] = []
        last: Any = None
        for index in range(len(self._source)):
            images = _images_to_group(self._source[index])
            if images is None or images != last:
                starts.append(index)
            last = images
        return starts

    def __bool__(self) -> bool:
        """Whether it has records, without reading them."""
        return bool(self._source)

    def __len__(self) -> int:
        return len(self._group_starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = self._group_range(index)
        if end == start + 1:
            return self._source[start]
        turns: list[Any] = []
        for at in range(start, end):
            said = read_with_images(self._source[at], _read_as_conversation).parsed
            turns += said.messages if at == start else [_remove_placeholders(turn) for turn in said.messages]
        return {"messages": turns, "images": list(_images_to_group(self._source[start]) or ())}

    def _group_range(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._group_starts[index], [*self._group_starts[index + 1 : index + 2], len(self._source)][0]

    def location(self, index: int) -> str:
        """The first of the records."""
        return self._source.location(self._group_range(index)[0])

    def get_base_dir(self, index: int) -> Path:
        return self._source.get_base_dir(
            self._group_range(index)[0] if index else 0
        )  # no record need be read for the first


def _images_to_group(record: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The record's images; None where it has none, is no plain dialog, or cannot be read: it then stays by itself."""
    try:
        seen = read_with_images(record, _read_as_conversation)
    except BadRecord:
        return None
    plain = not seen.parsed.tools and {turn["role"] for turn in seen.parsed.messages} == {"user", "assistant"}
    return seen.images if seen.images and plain else None


def _read_as_conversation(record: Mapping[str, Any]) -> Conversation:
    said: Sample = read_conversation(record)
    return said if isinstance(said, Conversation) else said.to_conversation()


def _remove_placeholders(message: Any) -> dict[str, Any]:
    return {**message, "content": message["content"].replace(IMAGE_PLACEHOLDER, "").strip("\n")}
