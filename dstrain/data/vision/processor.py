"""What a model's processor makes of images: how many tokens they take in a text, and the tensors that the model sees."""

from __future__ import annotations

import copy
import hashlib
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.data.cache.build import tokenizer_fingerprint
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.transcripts import IMAGE
from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns beside what it makes of images."""
KINDS = "mm_token_type_ids"
"""(B, L), 1 where an image's token stands; models that need it call it so, or `token_type_ids`."""
BLANK_SIDE = 56
"""Pixels of the blank image, both ways; the processor scales it as it does every other."""


class Sight:
    """A processor of transformers, asked in the two ways that preparation and training need. Thread-safe."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.mark = _mark_of(processor)
        self._marks = re.compile(f"{IMAGE}|{re.escape(self.mark)}")
        self._texts: dict[tuple[int, int], str] = {}
        self._counts: dict[str, int] = {}
        self._own = threading.local()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides what images become."""
        parts = [type(self.processor).__name__, self.processor.to_json_string(), tokenizer_fingerprint(self.tokenizer)]
        parts += [type(self.processor.image_processor).__name__, self.processor.image_processor.to_json_string()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def text_of(self, size: tuple[int, int]) -> str:
        """What stands in a text for an image of this width and height: its tokens and those around them."""
        found = self._texts.get(size)
        if found is None:
            from PIL import Image

            found = self._texts[size] = sys.intern(self._heard([Image.new("RGB", size)]))  # few texts, of many sizes
        return found

    def _heard(self, images: Sequence[Image], **settings: Any) -> str:
        processor = copy.copy(self._mine())
        processor.tokenizer = listener = _Listener(processor.tokenizer)
        processor(text=[self.mark * len(images)], images=[*images], **settings)
        return listener.heard

    def _mine(self) -> Any:
        """This thread's own processor, around the one tokenizer that all threads share: a large one is dear to copy."""
        if not hasattr(self._own, "processor"):
            self._own.processor = copy.deepcopy(self.processor, {id(self.tokenizer): self._shared})
        return self._own.processor

    @cached_property
    def _shared(self) -> _OneAtATime:
        """A copy: `tokenizer` itself is called by others, who know of no lock."""
        return _OneAtATime(copy.deepcopy(self.tokenizer))

    def expand(self, text: str, shown: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        """The text with each image as it is `shown`, and (letters before it, letters that came in) of each.

        Raises BadRecord where the text has more or fewer places for images.
        """
        places = [found.span() for found in self._marks.finditer(text)]
        if len(places) != len(shown):
            raise BadRecord(
                f"its text has {len(places)} times {self.mark}, and {len(shown)} images are to be seen; "
                "the chat template must write each image once, and the text must not name the token itself"
            )
        parts, grown, last = [], [], 0
        for (start, end), new in zip(places, shown, strict=True):
            parts += [text[last:start], new]
            grown.append((start, len(new) - (end - start)))
            last = end
        return "".join([*parts, text[last:]]), grown

    @cached_property
    def signs(self) -> frozenset[int]:
        """Ids that stand for images, and those of the special tokens around them."""
        return frozenset({*self._ids(self.blank_text)} & {*self.tokenizer.all_special_ids, *self.tokens})

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Ids that stand for images."""
        found = getattr(self.processor, "image_token_ids", None)
        return tuple(map(int, found or [self.tokenizer.convert_tokens_to_ids(self.mark)]))

    def count(self, ids: Iterable[int]) -> int:
        """How many of the ids belong to images."""
        return sum(int(token) in self.signs for token in ids)

    def count_of(self, text: str) -> int:
        """The same of what stands in a text for an image."""
        if text not in self._counts:
            self._counts[text] = self.count(self._ids(text))
        return self._counts[text]

    @cached_property
    def _plainly(self) -> dict[str, Any]:
        """Settings that have the blank image take few tokens."""
        splits = hasattr(self.processor.image_processor, "do_image_splitting")
        return {"images_kwargs": {"do_image_splitting": False}} if splits else {}

    @cached_property
    def blank_text(self) -> str:
        return self._heard([_blank()], **self._plainly)

    @cached_property
    def blank_ids(self) -> list[int]:
        """The blank image's row."""
        return self._ids(self.blank_text)

    @cached_property
    def blank_inputs(self) -> dict[str, torch.Tensor]:
        """The blank image as the model sees it."""
        return self._inputs([_blank()], **self._plainly)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def inputs(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """What the model takes of these images, by its names, in the order of their marks in a batch."""
        return self._inputs(images) if images else self.blank_inputs

    def _inputs(self, images: Sequence[Image], **settings: Any) -> dict[str, torch.Tensor]:
        made = self._mine()(text=[self.mark * len(images)], images=[*images], return_tensors="pt", **settings)
        return {name: value for name, value in made.items() if name not in OF_TEXT}

    def kinds(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) int64: 1 where an image's token stands."""
        import torch

        return torch.isin(ids, torch.tensor(self.tokens)).long()

    def into(self, batch: Batch, images: Sequence[Image]) -> Batch:
        """The batch with the images of its rows, in order; with a blank image in a row of its own where it has none.

        So the tower runs on every rank for every batch: with ZeRO all ranks must ask for the same weights, and bring
        gradients of the same weights, in the same order.
        """
        tensors = batch.tensors if images else self._with_blank_row(batch.tensors)
        vision = {**self.inputs(images), KINDS: self.kinds(tensors["input_ids"])}
        return replace(batch, tensors=tensors, vision=vision, blank_rows=0 if images else 1)

    def without_images(self, batch: Batch) -> Batch:
        """The batch of data that has no image at all, where the tower rests on every rank."""
        return replace(batch, vision={KINDS: self.kinds(batch.tensors["input_ids"])})

    def _with_blank_row(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Token ids and mask (B + 1, L'), L' the longer of both; `learnt` (B, K') goes on being the end of the rows."""
        import torch
        from torch.nn.functional import pad

        ids, mask, row = tensors["input_ids"], tensors["attention_mask"], torch.tensor([self.blank_ids])
        more, less = max(row.shape[1] - ids.shape[1], 0), max(ids.shape[1] - row.shape[1], 0)
        padding = self.tokenizer.pad_token_id
        found = {
            "input_ids": torch.cat([pad(ids, (0, more), value=padding), pad(row, (0, less), value=padding)]),
            "attention_mask": torch.cat([pad(mask, (0, more)), pad(torch.ones_like(row), (0, less))]),
        }
        return {**tensors, **found} | ({"learnt": pad(tensors["learnt"], (0, more))} if "learnt" in tensors else {})

    def settle(self, image: Image) -> Image | None:
        """A smaller image of which the processor makes the same."""
        from dstrain.data.vision.downscale import settled

        return settled(image, self._mine().image_processor)


def _mark_of(processor: Any) -> str:
    """The token that stands for an image in a text as the processor takes it. Raises RecipeError where there is none.

    Most call it `image_token`; Gemma 3's older versions take the one that begins an image, and refuse the other.
    """
    places = ((processor, "image_token"), (processor, "boi_token"), (processor.tokenizer, "image_token"))
    names = [str(name) for place, key in places if (name := getattr(place, key, None)) is not None]
    if not names:
        kind = type(processor).__name__
        raise RecipeError(Fault("model.processor", f"{kind} has no token for an image", "name another model"))
    return next((name for name in names if _takes(processor, name)), names[0])


def _takes(processor: Any, mark: str) -> bool:
    try:
        processor(text=[mark], images=[_blank()])
    except Exception:  # each family has its own way to refuse
        return False
    return True


def _blank() -> Image:
    """An image that shows nothing."""
    from PIL import Image

    return Image.new("RGB", (BLANK_SIDE, BLANK_SIDE), (127, 127, 127))


class _OneAtATime:
    """A tokenizer for several threads: fast ones may not be shared while they are called."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._turn = tokenizer, threading.Lock()

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        with self._turn:
            return self._tokenizer(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Listener:
    """A tokenizer that keeps the text it was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.heard = tokenizer, ""

    def __call__(self, text: Any, **settings: Any) -> Any:
        self.heard = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
