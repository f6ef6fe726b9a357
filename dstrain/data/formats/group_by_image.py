"""Source wrapper that merges consecutive records with the same images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dstrain.data.formats.conversations import Conversation, read_conversation
from dstrain.data.formats.image_placeholders import read_with_images
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.records import BadRecord, BadRow, Record, as_record
from dstrain.data.sources.base import Source


class GroupByImageSource:
    """A source whose consecutive records with the same images are one record."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.digest = hashlib.sha256(f"{source.digest} grouped by image".encode()).hexdigest()

    @property
    def bad_rows(self) -> list[BadRow]:
        return self._source.bad_rows

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

    def __bool__(self) -> bool:
        """Return whether it has records, without reading them."""
        return bool(self._source)

    def __len__(self) -> int:
        return len(self._group_starts)

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

    def location(self, index: int) -> str:
        """Return the location of the group's first record."""
        return self._source.location(self._group_range(index)[0])

    def get_base_dir(self, index: int) -> Path:
        # Group 0 starts at record 0: it is answered without reading all records.
        return self._source.get_base_dir(self._group_range(index)[0] if index else 0)


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
