"""Images in texts that are being written: put where they stand, never learnt, never cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.data.records import BadRecord
from dstrain.data.vision.processor import VisionProcessor

if TYPE_CHECKING:
    from dstrain.data.encoding.answer_spans import RenderedSample
    from dstrain.data.encoding.rendering import RenderedPrompt

ID_COLUMNS = {"input_ids", "chosen", "rejected"}
"""Those of examples that hold the ids of images."""


@dataclass(frozen=True)
class PlaceholderExpansion:
    """The images of some samples, as they stand in their texts."""

    vision_processor: VisionProcessor
    image_texts: Sequence[Sequence[str]]
    """Of each sample the text of each of its images, in order."""

    def expand_prompt(self, index: int, sample: RenderedPrompt | BadRecord) -> RenderedPrompt | BadRecord:
        """A rendered sample with its images in the prompt; the fault where they do not fit, or one was there."""
        try:
            return (
                sample
                if isinstance(sample, BadRecord)
                else replace(sample, prompt=self._expand_images(index, sample.prompt)[0])
            )
        except BadRecord as fault:
            return fault

    def expand_sample(self, index: int, sample: RenderedSample | BadRecord) -> RenderedSample | BadRecord:
        """A written sample with its images in the text, and what is learnt where it now stands."""
        try:
            if isinstance(sample, BadRecord):
                return sample
            text, grown = self._expand_images(index, sample.text)
            return replace(sample, text=text, trained_spans=tuple(_shift_spans(sample.trained_spans, grown)))
        except BadRecord as fault:
            return fault

    def map_offset(self, index: int, text: str, offset: int) -> int:
        """Where a letter of a sample's text stands once its images are in the text."""
        ((_, there),) = _shift_spans([(0, offset)], self._expand_images(index, text)[1])
        return there

    def _expand_images(self, index: int, text: str) -> tuple[str, list[tuple[int, int]]]:
        return self.vision_processor.expand_images(text, self.image_texts[index])

    def mask_image_tokens(self, ids: list[int], loss_mask: list[int]) -> list[int]:
        """What of the ids is learnt: what belongs to an image is not."""
        signs = self.vision_processor.image_related_ids
        return [0 if token in signs else mark for token, mark in zip(ids, loss_mask, strict=True)]

    def check_truncation(
        self, index: int, example: dict[str, Any] | BadRecord, limit_name: str
    ) -> dict[str, Any] | BadRecord:
        """The example, or a fault where truncation to the `room`, in words, took something of an image away."""
        if isinstance(example, BadRecord):
            return example
        needed = sum(self.vision_processor.count_in_text(text) for text in self.image_texts[index])
        for name in ID_COLUMNS & example.keys():
            there = self.vision_processor.count_image_ids(example[name])
            if there < needed:
                return BadRecord(
                    f"its images take {needed} tokens, and {limit_name} cuts {needed - there} of them off; "
                    "raise it, or remove the record"
                )
            if there > needed:
                return BadRecord(
                    f"its text names {self.vision_processor.image_token} itself, which stands for an image; write it otherwise"
                )
        return example


def _shift_spans(spans: Iterable[tuple[int, int]], shifts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Places in a text after images came into it."""
    starts, lengths = np.array(shifts, dtype=np.int64).reshape(-1, 2).T
    for start, end in spans:
        yield start + int(lengths[starts < start].sum()), end + int(lengths[starts < end].sum())
