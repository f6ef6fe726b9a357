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
from dstrain.data.fingerprint import tokenizer_fingerprint
from dstrain.data.formats.transcripts import IMAGE_PLACEHOLDER
from dstrain.data.records import BadRecord
from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns beside what it makes of images."""
MM_TOKEN_TYPE_IDS = "mm_token_type_ids"
"""(B, L), 1 where an image's token stands; models that need it call it so, or `token_type_ids`."""
BLANK_IMAGE_SIZE = 56
"""Pixels of the blank image, both ways; the processor scales it as it does every other."""


class VisionProcessor:
    """A processor of transformers, asked in the two ways that preparation and training need. Thread-safe."""

    def __init__(self, processor: Any) -> None:
        self.hf_processor, self.tokenizer = processor, processor.tokenizer
        self.image_token = _find_image_token(processor)
        self._image_pattern = re.compile(f"{IMAGE_PLACEHOLDER}|{re.escape(self.image_token)}")
        self._text_by_size: dict[tuple[int, int], str] = {}
        self._count_by_text: dict[str, int] = {}
        self._thread_local = threading.local()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides what images become."""
        parts = [
            type(self.hf_processor).__name__,
            self.hf_processor.to_json_string(),
            tokenizer_fingerprint(self.tokenizer),
        ]
        parts += [type(self.hf_processor.image_processor).__name__, self.hf_processor.image_processor.to_json_string()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def get_image_text(self, size: tuple[int, int]) -> str:
        """What stands in a text for an image of this width and height: its tokens and those around them."""
        found = self._text_by_size.get(size)
        if found is None:
            from PIL import Image

            found = self._text_by_size[size] = sys.intern(
                self._expand_images([Image.new("RGB", size)])
            )  # few texts, of many sizes
        return found

    def _expand_images(self, images: Sequence[Image], **kwargs: Any) -> str:
        processor = copy.copy(self._get_thread_processor())
        processor.tokenizer = listener = _RecordingTokenizer(processor.tokenizer)
        processor(text=[self.image_token * len(images)], images=[*images], **kwargs)
        return listener.last_text

    def _get_thread_processor(self) -> Any:
        """This thread's own processor, around the one tokenizer that all threads share: a large one is dear to copy."""
        if not hasattr(self._thread_local, "processor"):
            self._thread_local.processor = copy.deepcopy(
                self.hf_processor, {id(self.tokenizer): self._shared_tokenizer}
            )
        return self._thread_local.processor

    @cached_property
    def _shared_tokenizer(self) -> _LockedTokenizer:
        """A copy: `tokenizer` itself is called by others, who know of no lock."""
        return _LockedTokenizer(copy.deepcopy(self.tokenizer))

    def expand_images(self, text: str, image_texts: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        """The text with each image as it is `shown`, and (letters before it, letters that came in) of each.

        Raises BadRecord where the text has more or fewer places for images.
        """
        places = [found.span() for found in self._image_pattern.finditer(text)]
        if len(places) != len(image_texts):
            raise BadRecord(
                f"its text has {len(places)} times {self.image_token}, and {len(image_texts)} images are to be seen; "
                "the chat template must write each image once, and the text must not name the token itself"
            )
        parts, grown, last = [], [], 0
        for (start, end), new in zip(places, image_texts, strict=True):
            parts += [text[last:start], new]
            grown.append((start, len(new) - (end - start)))
            last = end
        return "".join([*parts, text[last:]]), grown

    @cached_property
    def image_related_ids(self) -> frozenset[int]:
        """Ids that stand for images, and those of the special tokens around them."""
        return frozenset(
            {*self._tokenize(self.blank_image_text)} & {*self.tokenizer.all_special_ids, *self.image_token_ids}
        )

    @cached_property
    def image_token_ids(self) -> tuple[int, ...]:
        """Ids that stand for images."""
        found = getattr(self.hf_processor, "image_token_ids", None)
        return tuple(map(int, found or [self.tokenizer.convert_tokens_to_ids(self.image_token)]))

    def count_image_ids(self, ids: Iterable[int]) -> int:
        """How many of the ids belong to images."""
        return sum(int(token) in self.image_related_ids for token in ids)

    def count_in_text(self, text: str) -> int:
        """The same of what stands in a text for an image."""
        if text not in self._count_by_text:
            self._count_by_text[text] = self.count_image_ids(self._tokenize(text))
        return self._count_by_text[text]

    @cached_property
    def _blank_image_kwargs(self) -> dict[str, Any]:
        """Settings that have the blank image take few tokens."""
        splits = hasattr(self.hf_processor.image_processor, "do_image_splitting")
        return {"images_kwargs": {"do_image_splitting": False}} if splits else {}

    @cached_property
    def blank_image_text(self) -> str:
        return self._expand_images([_make_blank_image()], **self._blank_image_kwargs)

    @cached_property
    def blank_image_ids(self) -> list[int]:
        """The blank image's row."""
        return self._tokenize(self.blank_image_text)

    @cached_property
    def blank_image_inputs(self) -> dict[str, torch.Tensor]:
        """The blank image as the model sees it."""
        return self._process_images([_make_blank_image()], **self._blank_image_kwargs)

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def image_inputs(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """What the model takes of these images, by its names, in the order of their marks in a batch."""
        return self._process_images(images) if images else self.blank_image_inputs

    def _process_images(self, images: Sequence[Image], **kwargs: Any) -> dict[str, torch.Tensor]:
        made = self._get_thread_processor()(
            text=[self.image_token * len(images)], images=[*images], return_tensors="pt", **kwargs
        )
        return {name: value for name, value in made.items() if name not in TEXT_INPUTS}

    def token_type_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) int64: 1 where an image's token stands."""
        import torch

        return torch.isin(ids, torch.tensor(self.image_token_ids)).long()

    def attach_images(self, batch: Batch, images: Sequence[Image]) -> Batch:
        """The batch with the images of its rows, in order; with a blank image in a row of its own where it has none.

        So the tower runs on every rank for every batch: with ZeRO all ranks must ask for the same weights, and bring
        gradients of the same weights, in the same order.
        """
        tensors = batch.tensors if images else self._append_blank_row(batch.tensors)
        vision = {**self.image_inputs(images), MM_TOKEN_TYPE_IDS: self.token_type_ids(tensors["input_ids"])}
        return replace(batch, tensors=tensors, vision=vision, dummy_rows=0 if images else 1)

    def attach_no_images(self, batch: Batch) -> Batch:
        """The batch of data that has no image at all, where the tower rests on every rank."""
        return replace(batch, vision={MM_TOKEN_TYPE_IDS: self.token_type_ids(batch.tensors["input_ids"])})

    def _append_blank_row(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Token ids and mask (B + 1, L'), L' the longer of both; `learnt` (B, K') goes on being the end of the rows."""
        import torch
        from torch.nn.functional import pad

        ids, mask, row = tensors["input_ids"], tensors["attention_mask"], torch.tensor([self.blank_image_ids])
        more, less = max(row.shape[1] - ids.shape[1], 0), max(ids.shape[1] - row.shape[1], 0)
        padding = self.tokenizer.pad_token_id
        found = {
            "input_ids": torch.cat([pad(ids, (0, more), value=padding), pad(row, (0, less), value=padding)]),
            "attention_mask": torch.cat([pad(mask, (0, more)), pad(torch.ones_like(row), (0, less))]),
        }
        return {**tensors, **found} | ({"learnt": pad(tensors["learnt"], (0, more))} if "learnt" in tensors else {})

    def downscale(self, image: Image) -> Image | None:
        """A smaller image of which the processor makes the same."""
        from dstrain.data.vision.downscale import downscale_if_equivalent

        return downscale_if_equivalent(image, self._get_thread_processor().image_processor)


def _find_image_token(processor: Any) -> str:
    """The token that stands for an image in a text as the processor takes it. Raises RecipeError where there is none.

    Most call it `image_token`; Gemma 3's older versions take the one that begins an image, and refuse the other.
    """
    places = ((processor, "image_token"), (processor, "boi_token"), (processor.tokenizer, "image_token"))
    names = [str(name) for place, key in places if (name := getattr(place, key, None)) is not None]
    if not names:
        kind = type(processor).__name__
        raise RecipeError(Fault("model.processor", f"{kind} has no token for an image", "name another model"))
    return next((name for name in names if _accepts_token(processor, name)), names[0])


def _accepts_token(processor: Any, image_token: str) -> bool:
    try:
        processor(text=[image_token], images=[_make_blank_image()])
    except Exception:  # each family has its own way to refuse
        return False
    return True


def _make_blank_image() -> Image:
    """An image that shows nothing."""
    from PIL import Image

    return Image.new("RGB", (BLANK_IMAGE_SIZE, BLANK_IMAGE_SIZE), (127, 127, 127))


class _LockedTokenizer:
    """A tokenizer for several threads: fast ones may not be shared while they are called."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _RecordingTokenizer:
    """A tokenizer that keeps the text it was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.last_text = tokenizer, ""

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        self.last_text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
