"""Vision-language models: a model that sees images learns to answer questions about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import HeldOutConfig, SourceConfig
from dstrain.data.formats.conversations import Passage
from dstrain.data.formats.group_by_image import Grouped
from dstrain.data.formats.image_placeholders import Seen, read_seen
from dstrain.data.formats.transcripts import IMAGE, render_messages
from dstrain.data.sources.base import Source
from dstrain.data.vision.augment import Augment
from dstrain.errors import RecipeError
from dstrain.models.checks.preflight import blind
from dstrain.tasks.common.tiny import tiny_recipe
from dstrain.tasks.sft import SupervisedFineTuning

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class VisionLanguage(SupervisedFineTuning):
    """Vision-language models: answers about images, and about texts among them, any number of images in each.

    The loss is that of task sft; Liu et al. (arXiv 2304.08485), section 4.2, has the two stages: the projector alone on
    captions, then projector and language model on dialogs (model.freeze and optim.groups name the parts).
    """

    metric_names = ("token_accuracy", "exact_match")

    one_sample_per_image: bool = False
    """Make the training records of a file that follow one another about the same images the turns of one dialog."""
    flip: float = 0.0
    """Chance that a training image is mirrored, left for right; a question of left and right must not stand beside it."""
    shift: bool = False
    """Move what a training image shows on a plain background to a random place, whole within the frame."""

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip:g}, but a chance lies from 0 to 1")

    def check(self) -> None:
        super().check()
        if not self.sees:
            raise RecipeError(
                blind("model.path" if self.recipe.model.path else "model.config", self.model_config.model_type)
            )

    def read(self, record: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any]) -> Seen[Any]:
        """The same where no model is named: whichever it is, it sees."""
        return (
            super().read(record, read)
            if self.recipe.model.path or self.recipe.model.config
            else read_seen(record, read)
        )

    def texts(self, record: dict[str, Any]) -> Iterator[str]:
        sample = self.convert(record).said
        dialog = sample.as_conversation() if isinstance(sample, Passage) else sample
        yield render_messages(dialog.messages).replace(IMAGE, "")  # with what stands between the turns

    def prepared(self, source: Source, item: HeldOutConfig) -> Source:
        training = self.one_sample_per_image and isinstance(item, SourceConfig)
        return Grouped(source) if training else source

    def alter(self, image: Image, example: Mapping[str, Any], which: int) -> Image:
        return image if "place" not in example else self._augment(image, example["place"], which)

    @cached_property
    def _augment(self) -> Augment:
        return Augment(shift=self.shift, flip=self.flip, seed=self.recipe.seed)

    def beside(self, right: torch.Tensor, learnt: torch.Tensor) -> Mapping[str, Any]:
        from dstrain.tasks.common.losses import exact_answers

        return {"exact_match": exact_answers(right, learnt)}

    @classmethod
    def tiny(cls, folder: Path) -> dict[str, Any]:
        recipe = tiny_recipe(folder, "vlm", lambda split, index: _coloured(folder, split, index))
        recipe["model"] = {"config": TINY, "freeze": ["*.post_layernorm"]}  # which a LLaVA does not look at
        return recipe


TINY: dict[str, Any] = {
    "model_type": "llava",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -1,
    "text_config": {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "vision_config": {
        "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "hidden_size": 24, "intermediate_size": 36,
        "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 24,
    },
}  # fmt: skip
"""A LLaVA of seconds: 4 tokens for an image."""
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220)}


def _coloured(folder: Path, split: str, index: int) -> dict[str, Any]:
    """A made-up question about no image, one or two; all are of one colour."""
    from PIL import Image

    draw = random.Random(f"{split}/{index}")
    count, names = index % 3, [draw.choice([*COLOURS]) for _ in range(index % 3)]
    places = [folder / f"{split}-{index}-{at}.png" for at in range(count)]
    for place, name in zip(places, names, strict=True):
        Image.new("RGB", (draw.randint(8, 24), draw.randint(8, 24)), COLOURS[name]).save(place)
    if not count:
        turns = [("user", f"What is sky{'?' * draw.randint(1, 3)}"), ("assistant", "Blue, mostly.")]
    else:
        turns = [("user", "<image>" * count + "\nWhich colour?"), ("assistant", " and ".join(names) + ".")]
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, "images": [place.name for place in places]}
