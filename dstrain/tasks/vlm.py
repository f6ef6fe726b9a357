"""Vision-language models, trained on conversations about images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.config.schema import DatasetConfig, TrainDatasetConfig
from dstrain.data.formats.conversations import PromptCompletion
from dstrain.data.formats.images import GroupByImageSource, RecordWithImages, read_with_images
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.rng import IMAGE_STREAM, make_random_state
from dstrain.data.sources.base import Source
from dstrain.errors import RecipeError
from dstrain.models.checks import text_only_fault
from dstrain.tasks.common.text import TextChecks
from dstrain.tasks.sft import SFT

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class VLMChecks(TextChecks):
    """The checks of a text task; the model has to be a vision-language model."""

    def run(self) -> None:
        super().run()
        recipe, source = self.task.recipe, self.task.model_source
        if not source.is_multimodal:
            key = "model.path" if recipe.model.path else "model.config"
            raise RecipeError(text_only_fault(key, source.config.model_type, f"task {recipe.task}"))


@dataclass(frozen=True, kw_only=True)
class VLM(SFT):
    """Vision-language models: answers in conversations with any number of images.

    The loss is that of task sft; Liu et al. (arXiv 2304.08485), section 4.2, has the two stages: the projector alone on
    captions, then projector and language model on conversations (model.freeze and optim.groups name the parts).
    """

    metric_names = ("token_accuracy", "exact_match")
    needs_vision = True
    packs_batches = True

    group_by_image: bool = False
    """Group consecutive training records with the same images into one multi-turn conversation."""
    horizontal_flip: float = 0.0
    """Probability of a horizontal flip. Keep 0 if questions mention left or right."""
    random_translate: bool = False
    """Move the content of a training image on a plain background to a random place, whole within the frame."""

    def __post_init__(self) -> None:
        if not 0 <= self.horizontal_flip <= 1:
            raise ValueError(f"horizontal_flip is {self.horizontal_flip:g}, but a probability is between 0 and 1")

    @cached_property
    def checks(self) -> VLMChecks:
        return VLMChecks(parse_record=self.parse_record, task=self)

    def parse_with_images(
        self, record: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Any]
    ) -> RecordWithImages[Any]:
        if not self.model_source.is_named:
            return read_with_images(record, parse)
        return super().parse_with_images(record, parse)

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        from dstrain.data.encoding.chat_template import messages_to_transcript

        sample = self.parse_record(record).parsed
        dialog = sample.to_conversation() if isinstance(sample, PromptCompletion) else sample
        yield messages_to_transcript(dialog.messages).replace(IMAGE_PLACEHOLDER, "")  # with the text between turns

    def wrap_source(self, source: Source, item: DatasetConfig) -> Source:
        training = self.group_by_image and isinstance(item, TrainDatasetConfig)
        return GroupByImageSource(source) if training else source

    def augment_image(self, image: Image, position: int, index: int) -> Image:
        from PIL import Image

        # Seed, position and number determine the result, whatever the world size.
        random = make_random_state((self.recipe.seed, IMAGE_STREAM, position, index))
        pixels = before = np.asarray(image)
        if random.random_sample() < self.horizontal_flip:
            pixels = pixels[:, ::-1]
        if self.random_translate:
            pixels = translate_foreground(pixels, *random.random_sample(2))
        # Unchanged images are returned as they are, without a copy.
        return image if pixels is before else Image.fromarray(np.ascontiguousarray(pixels))

    def extra_metrics(self, is_correct: torch.Tensor, loss_mask: torch.Tensor) -> Mapping[str, Any]:
        from dstrain.tasks.common.forward import count_exact_answers

        return {"exact_match": count_exact_answers(is_correct, loss_mask)}


def translate_foreground(pixels: np.ndarray, down: float, right: float) -> np.ndarray:
    """Return pixels (H, W, 3) uint8 with the part that differs from the border's colour moved.

    `down` and `right` in [0, 1) select among the places inside the frame. An image whose border has
    several colours is returned unchanged.
    """
    background = pixels[0, 0]
    if any((edge != background).any() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])):
        return pixels
    differs = (pixels != background).any(axis=-1)  # (H, W)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if not len(rows):
        return pixels
    found = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]  # (h, w, 3)
    top = int(down * (len(pixels) - len(found) + 1))
    left = int(right * (pixels.shape[1] - found.shape[1] + 1))
    moved = np.empty_like(pixels)
    moved[:] = background  # (H, W, 3) of the border's colour
    moved[top : top + len(found), left : left + found.shape[1]] = found
    return moved
