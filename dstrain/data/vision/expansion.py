"""Images in texts that are being written: put where they stand, never learnt, never cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.data.formats.messages import BadRecord
from dstrain.data.vision.processor import Sight

if TYPE_CHECKING:
    from dstrain.data.encoding.answer_spans import Written
    from dstrain.data.encoding.rendering import Rendered

COLUMNS = {"input_ids", "chosen", "rejected"}
"""Those of examples that hold the ids of images."""


@dataclass(frozen=True)
class Views:
    """The images of some samples, as they stand in their texts."""

    sight: Sight
    texts: Sequence[Sequence[str]]
    """Of each sample the text of each of its images, in order."""

    def in_prompt(self, at: int, item: Rendered | BadRecord) -> Rendered | BadRecord:
        """A rendered sample with its images in the prompt; the fault where they do not fit, or one was there."""
        try:
            return item if isinstance(item, BadRecord) else replace(item, prompt=self._expand(at, item.prompt)[0])
        except BadRecord as fault:
            return fault

    def in_written(self, at: int, item: Written | BadRecord) -> Written | BadRecord:
        """A written sample with its images in the text, and what is learnt where it now stands."""
        try:
            if isinstance(item, BadRecord):
                return item
            text, grown = self._expand(at, item.text)
            return replace(item, text=text, spans=tuple(_shifted(item.spans, grown)))
        except BadRecord as fault:
            return fault

    def moved(self, at: int, text: str, letter: int) -> int:
        """Where a letter of a sample's text stands once its images are in the text."""
        ((_, there),) = _shifted([(0, letter)], self._expand(at, text)[1])
        return there

    def _expand(self, at: int, text: str) -> tuple[str, list[tuple[int, int]]]:
        return self.sight.expand(text, self.texts[at])

    def not_learnt(self, ids: list[int], learnt: list[int]) -> list[int]:
        """What of the ids is learnt: what belongs to an image is not."""
        signs = self.sight.signs
        return [0 if token in signs else mark for token, mark in zip(ids, learnt, strict=True)]

    def whole(self, at: int, example: dict[str, Any] | BadRecord, room: str) -> dict[str, Any] | BadRecord:
        """The example, or a fault where truncation to the `room`, in words, took something of an image away."""
        if isinstance(example, BadRecord):
            return example
        needed = sum(self.sight.count_of(text) for text in self.texts[at])
        for name in COLUMNS & example.keys():
            there = self.sight.count(example[name])
            if there < needed:
                return BadRecord(
                    f"its images take {needed} tokens, and {room} cuts {needed - there} of them off; "
                    "raise it, or remove the record"
                )
            if there > needed:
                return BadRecord(
                    f"its text names {self.sight.mark} itself, which stands for an image; write it otherwise"
                )
        return example


def _shifted(spans: Iterable[tuple[int, int]], grown: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Places in a text after images came into it."""
    starts, lengths = np.array(grown, dtype=np.int64).reshape(-1, 2).T
    for start, end in spans:
        yield start + int(lengths[starts < start].sum()), end + int(lengths[starts < end].sum())
