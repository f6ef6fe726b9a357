"""Records about one image as one: its questions become the turns of one conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dstrain.data.formats.conversations import Conversation, Sample, read_conversation
from dstrain.data.formats.image_placeholders import read_seen
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.transcripts import IMAGE
from dstrain.data.sources.open import BadRow, Source


class Grouped:
    """A source whose records that follow one another with the same images are one record."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.digest = hashlib.sha256(f"{source.digest} grouped by image".encode()).hexdigest()

    @property
    def bad(self) -> list[BadRow]:
        return self._source.bad

    @cached_property
    def _starts(self) -> list[int]:
        """Where each group begins: every record is read for it."""
        starts: list[int] = []
        last: Any = None
        for index in range(len(self._source)):
            images = _images(self._source[index])
            if images is None or images != last:
                starts.append(index)
            last = images
        return starts

    def __bool__(self) -> bool:
        """Whether it has records, without reading them."""
        return bool(self._source)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = self._span(index)
        if end == start + 1:
            return self._source[start]
        turns: list[Any] = []
        for at in range(start, end):
            said = read_seen(self._source[at], _read_turns).said
            turns += said.messages if at == start else [_without_image(turn) for turn in said.messages]
        return {"messages": turns, "images": list(_images(self._source[start]) or ())}

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._starts[index], [*self._starts[index + 1 : index + 2], len(self._source)][0]

    def where(self, index: int) -> str:
        """The first of the records."""
        return self._source.where(self._span(index)[0])

    def folder_of(self, index: int) -> Path:
        return self._source.folder_of(self._span(index)[0] if index else 0)  # no record need be read for the first


def _images(record: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The record's images; None where it has none, is no plain dialog, or cannot be read: it then stays by itself."""
    try:
        seen = read_seen(record, _read_turns)
    except BadRecord:
        return None
    plain = not seen.said.tools and {turn["role"] for turn in seen.said.messages} == {"user", "assistant"}
    return seen.images if seen.images and plain else None


def _read_turns(record: Mapping[str, Any]) -> Conversation:
    said: Sample = read_conversation(record)
    return said if isinstance(said, Conversation) else said.as_conversation()


def _without_image(turn: Any) -> dict[str, Any]:
    return {**turn, "content": turn["content"].replace(IMAGE, "").strip("\n")}
