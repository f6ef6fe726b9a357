"""Image processors, and the mean and deviation of a data set's images."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.batch import Batch, PackedGroup
from dstrain.cache import get_or_build, read_cached_json
from dstrain.data.encoding.chat_template import tokenizer_fingerprint
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.sources.base import Source
from dstrain.data.vision.images import read_image, resolve_image
from dstrain.errors import BadRecord, DataError, Fault, RecipeError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


# Shapes: B rows of a batch, L tokens, K tokens from the first target to the end.


TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Outputs of a processor for the text; its other outputs are for the images."""
MM_TOKEN_TYPE_IDS = "mm_token_type_ids"
"""(B, L), 1 for image tokens; the parameter's name in models that need it, or `token_type_ids`."""
IMAGE_GRIDS = "image_grid_thw"
"""(N, 3), rows of patches of N images along time, height and width, in families that count positions by them."""
BLANK_IMAGE_SIZE = 56
"""Width and height of the blank image in pixels; the processor scales it as any other."""


@dataclass(frozen=True)
class ImageInputs:
    """What a processor makes of the images of a batch."""

    tensors: dict[str, torch.Tensor]
    """The model's inputs, by parameter name."""
    num_tokens: int
    """Image tokens that these images take."""


class VisionProcessor:
    """A transformers processor, as data preparation and training need it. Thread-safe."""

    def __init__(self, processor: Any) -> None:
        self.hf_processor, self.tokenizer = processor, processor.tokenizer
        self.image_token = _find_image_token(processor)
        self._image_pattern = re.compile(f"{IMAGE_PLACEHOLDER}|{re.escape(self.image_token)}")
        self._text_by_size: dict[tuple[int, int], str] = {}
        self._count_by_text: dict[str, int] = {}
        # Processors keep state during a call, so each thread has its own copy.
        self._thread_local = threading.local()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the tokens and tensors of images."""
        return self.compute_fingerprint()

    def compute_fingerprint(self, with_pad_token: bool = True) -> str:
        """Return the hash; without the pad token, that of texts and images before padding."""
        parts = [
            type(self.hf_processor).__name__,
            self.hf_processor.to_json_string(),
            tokenizer_fingerprint(self.tokenizer, with_pad_token),
        ]
        parts += [type(self.hf_processor.image_processor).__name__, self.hf_processor.image_processor.to_json_string()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def get_image_text(self, size: tuple[int, int]) -> str:
        """Return the expanded text of an image of this width and height: image tokens and those around."""
        text = self._text_by_size.get(size)
        if text is None:
            from PIL import Image

            text = self._expand_images([Image.new("RGB", size)])
            # Many sizes share few texts: intern keeps one copy of each.
            text = self._text_by_size[size] = sys.intern(text)
        return text

    def _expand_images(self, images: Sequence[Image], **kwargs: Any) -> str:
        """Return the text that the processor passes to its tokenizer, recorded on a copy."""
        # A shallow copy: only its tokenizer is replaced.
        processor = copy.copy(self._get_thread_processor())
        processor.tokenizer = recorder = _RecordingTokenizer(processor.tokenizer)
        processor(text=[self.image_token * len(images)], images=[*images], **kwargs)
        return recorder.last_text

    def _get_thread_processor(self) -> Any:
        """Return this thread's copy of the processor; all share one tokenizer, which is large to copy."""
        if not hasattr(self._thread_local, "processor"):
            self._thread_local.processor = copy.deepcopy(
                self.hf_processor, {id(self.tokenizer): self._shared_tokenizer}
            )
        return self._thread_local.processor

    @cached_property
    def _shared_tokenizer(self) -> _LockedTokenizer:
        """A copy, because `tokenizer` itself is also called without the lock."""
        return _LockedTokenizer(copy.deepcopy(self.tokenizer))

    def expand_images(self, text: str, image_texts: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with its placeholders expanded, and (start, characters added) of each.

        Raises BadRecord if the number of placeholders is not that of the images.
        """
        places = [found.span() for found in self._image_pattern.finditer(text)]
        if len(places) != len(image_texts):
            raise BadRecord(
                f"its text has {len(places)} times {self.image_token} for {len(image_texts)} images; "
                "the chat template must write each image once, and the text must not name the token itself"
            )
        parts, shifts, last = [], [], 0
        for (start, end), new in zip(places, image_texts, strict=True):
            parts += [text[last:start], new]
            shifts.append((start, len(new) - (end - start)))
            last = end
        return "".join([*parts, text[last:]]), shifts

    @cached_property
    def image_related_ids(self) -> frozenset[int]:
        """Ids of image tokens and of the special tokens around them."""
        return frozenset(
            # Special tokens only: separators such as line breaks also occur in text.
            {*self._tokenize(self.blank_image_text)} & {*self.tokenizer.all_special_ids, *self.image_token_ids}
        )

    @cached_property
    def image_token_ids(self) -> tuple[int, ...]:
        """Ids of image tokens."""
        found = getattr(self.hf_processor, "image_token_ids", None)
        return tuple(map(int, found or [self.tokenizer.convert_tokens_to_ids(self.image_token)]))

    def count_image_ids(self, ids: Iterable[int]) -> int:
        """Return how many of the ids belong to images."""
        return sum(int(token) in self.image_related_ids for token in ids)

    def count_in_text(self, text: str) -> int:
        """Return `count_image_ids` of an image's expanded text."""
        if text not in self._count_by_text:
            self._count_by_text[text] = self.count_image_ids(self._tokenize(text))
        return self._count_by_text[text]

    @cached_property
    def _blank_image_kwargs(self) -> dict[str, Any]:
        """Arguments that give the blank image few tokens."""
        # Processors that split images into tiles would make many tiles of any image.
        splits = hasattr(self.hf_processor.image_processor, "do_image_splitting")
        return {"images_kwargs": {"do_image_splitting": False}} if splits else {}

    @cached_property
    def blank_image_text(self) -> str:
        """Expanded text of the blank image."""
        return self._expand_images([_make_blank_image()], **self._blank_image_kwargs)

    @cached_property
    def blank_image_ids(self) -> list[int]:
        """Token ids of the blank image, a row of a batch."""
        return self._tokenize(self.blank_image_text)

    @cached_property
    def blank_image_inputs(self) -> ImageInputs:
        """What the processor makes of the blank image."""
        return self._process_images([_make_blank_image()], **self._blank_image_kwargs)

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def image_inputs(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return the model's inputs for the images of a batch in order, by parameter name."""
        return self._inputs_of(images).tensors

    def _inputs_of(self, images: Sequence[Image]) -> ImageInputs:
        return self._process_images(images) if images else self.blank_image_inputs

    def _process_images(self, images: Sequence[Image], **kwargs: Any) -> ImageInputs:
        outputs = self._get_thread_processor()(
            text=[self.image_token * len(images)], images=[*images], return_tensors="pt", **kwargs
        )
        tensors = {name: value for name, value in outputs.items() if name not in TEXT_INPUTS}
        return ImageInputs(tensors, int(self.token_type_ids(outputs["input_ids"]).sum()))

    def token_type_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (B, L) int64, 1 for image tokens, of ids (B, L)."""
        import torch

        return torch.isin(ids, torch.tensor(self.image_token_ids)).long()

    def attach_images(self, batch: Batch, images: Sequence[Image]) -> Batch:
        """Return the batch with the images of its rows, or with a dummy row of a blank image if it has none.

        A packed batch gets a dummy group in place of the row.
        The vision tower thus runs on every rank for every batch: with ZeRO all ranks must gather the
        same weights and reduce the same gradients in the same order. Raises DataError where the rows have another
        number of image tokens than their images take.
        """
        if not images:
            batch = self._append_blank_group(batch) if batch.is_packed else self._append_blank_row(batch)
        made, kinds = self._inputs_of(images), self.token_type_ids(batch.tensors["input_ids"])
        if int(kinds.sum()) != made.num_tokens:
            raise DataError(self._describe_mismatch(batch, kinds, images))
        vision = made.tensors
        if batch.is_packed and IMAGE_GRIDS in vision:
            batch = batch.with_tensors({"position_ids": self._rope_positions(batch, vision[IMAGE_GRIDS])})
        return replace(batch, vision={**vision, MM_TOKEN_TYPE_IDS: kinds})

    def _describe_mismatch(self, batch: Batch, kinds: torch.Tensor, images: Sequence[Image]) -> str:
        """Return which row has another number of image tokens than its images take; `kinds`: (B, L), 1 for such tokens."""
        rows = kinds[0].split([group.tokens for group in batch.groups]) if batch.is_packed else kinds
        sizes = [self._count_image_tokens(image.size) for image in images]
        for row, is_image in enumerate(rows):
            places, needed = int(is_image.sum()), 0
            while sizes and needed < places:
                needed += sizes.pop(0)
            if needed != places:
                sample = f" (sample {batch.samples[row % len(batch.samples)]})" if batch.samples else ""
                return (
                    f"row {row} of a batch{sample} has {places} image tokens, and its images take {needed}: "
                    "an image has another size than where the record was encoded; a change of images must keep their size"
                )
        return f"the rows of a batch have {int(kinds.sum())} image tokens, and {len(sizes)} more images need places"

    def attach_no_images(self, batch: Batch) -> Batch:
        """Return a batch of data without any images: the vision tower runs on no rank."""
        return replace(batch, vision={MM_TOKEN_TYPE_IDS: self.token_type_ids(batch.tensors["input_ids"])})

    def _append_blank_row(self, batch: Batch) -> Batch:
        """Return the batch with ids and mask (B + 1, L'), L' the longer of batch and blank row.

        The loss mask `loss_mask` (B, K) is padded too, because its columns are the last of the rows.
        """
        import torch
        from torch.nn.functional import pad

        tensors, row = batch.tensors, torch.tensor([self.blank_image_ids])
        ids, mask = tensors["input_ids"], tensors["attention_mask"]
        # At most one of them is above 0: the shorter is padded to the longer.
        extra, short = max(row.shape[1] - ids.shape[1], 0), max(ids.shape[1] - row.shape[1], 0)
        pad_id = self.tokenizer.pad_token_id
        found = {
            "input_ids": torch.cat([pad(ids, (0, extra), value=pad_id), pad(row, (0, short), value=pad_id)]),
            "attention_mask": torch.cat([pad(mask, (0, extra)), pad(torch.ones_like(row), (0, short))]),
        }
        found |= {"loss_mask": pad(tensors["loss_mask"], (0, extra))} if "loss_mask" in tensors else {}
        return replace(batch.with_tensors(found), dummy_rows=1)

    def _append_blank_group(self, batch: Batch) -> Batch:
        """Return the packed batch with the blank image as a group of its own at the end, which no loss reads."""
        import torch

        row = torch.tensor([self.blank_image_ids])
        more = {"input_ids": row, "position_ids": torch.arange(row.shape[1])[None]}
        found = {name: torch.cat([batch.tensors[name], value], 1) for name, value in more.items()}
        groups = (*batch.groups, PackedGroup(0, (row.shape[1],)))
        return replace(batch.with_tensors(found), groups=groups, dummy_rows=1)

    def _rope_positions(self, batch: Batch, grids: torch.Tensor) -> torch.Tensor:
        """Return the positions (3, 1, T) of a packed batch, where a family counts them by the images' patches (N, 3)."""
        import torch

        merged = self.hf_processor.image_processor.merge_size
        sizes = [(time, height // merged, width // merged) for time, height, width in grids.tolist()]
        is_image = self.token_type_ids(batch.tensors["input_ids"])[0].numpy() > 0
        return torch.from_numpy(packed_rope_positions(is_image, batch.groups, sizes))[:, None]

    def _count_image_tokens(self, size: tuple[int, int]) -> int:
        ids = self._tokenize(self.get_image_text(size))
        return sum(token in self.image_token_ids for token in ids)

    def downscale(self, image: Image) -> Image | None:
        """Return a smaller image with the same processor output; None if there is none."""
        from dstrain.data.vision.images import downscale_if_equivalent

        return downscale_if_equivalent(image, self._get_thread_processor().image_processor)


def _find_image_token(processor: Any) -> str:
    """Return the token that the processor replaces by an image. Raises RecipeError if there is none.

    Most processors name it `image_token`; older ones of Gemma 3 accept only `boi_token`.
    """
    # In the order in which newer and older processors define it.
    places = ((processor, "image_token"), (processor, "boi_token"), (processor.tokenizer, "image_token"))
    names = [str(name) for place, key in places if (name := getattr(place, key, None)) is not None]
    if not names:
        kind = type(processor).__name__
        raise RecipeError(Fault("model.processor", f"{kind} has no token for an image", "name another model"))
    return next((name for name in names if _accepts_token(processor, name)), names[0])


def _accepts_token(processor: Any, image_token: str) -> bool:
    try:
        processor(text=[image_token], images=[_make_blank_image()])
    except Exception:  # each model family raises another one
        return False
    return True


def _make_blank_image() -> Image:
    """Return a grey image."""
    from PIL import Image

    return Image.new("RGB", (BLANK_IMAGE_SIZE, BLANK_IMAGE_SIZE), (127, 127, 127))


class _LockedTokenizer:
    """A tokenizer for several threads; a fast one must not run in two threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._tokenizer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _RecordingTokenizer:
    """A tokenizer that records the text of its last call."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.last_text = tokenizer, ""

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        self.last_text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


Grid = tuple[int, int, int]
"""Tokens of an image along time, height and width."""


def packed_rope_positions(is_image: np.ndarray, groups: Sequence[PackedGroup], grids: Sequence[Grid]) -> np.ndarray:
    """Return the positions of a packed row's tokens, (3, T) int64; a branch goes on where its prefix ends.

    `is_image`: (T,) bool. `grids`: of the row's images, N in the order of their tokens. Wang et al. (arXiv 2409.12191),
    section 2.1: an image counts from the next position along each axis, and text goes on after its longest side. Raises
    ValueError where the images' tokens are not those of the grids.
    """
    parts: list[np.ndarray] = []
    left, at = iter(grids), 0
    for group in groups:
        prefix, begin = _sequence_positions(is_image[at : at + group.prefix], left, 0)
        parts.append(prefix)
        at += group.prefix
        for branch in group.branches:
            parts.append(_sequence_positions(is_image[at : at + branch], left, begin)[0])
            at += branch
    if next(left, None) is not None:
        raise ValueError(f"the row has fewer images than the {len(grids)} that were read")
    return np.concatenate(parts, axis=1)


def _sequence_positions(is_image: np.ndarray, grids: Iterator[Grid], begin: int) -> tuple[np.ndarray, int]:
    """Return the positions (3, L) of L consecutive tokens that begin at a position, and the position after them."""
    found, at = np.empty((3, len(is_image)), dtype=np.int64), 0
    while at < len(is_image):
        rest = is_image[at:]
        if not rest[0]:
            length = int(rest.argmax()) or len(rest)
            found[:, at : at + length] = begin + np.arange(length)
            begin += length
        else:
            if (grid := next(grids, None)) is None:
                raise ValueError("the row has more images than were read")
            length = int(np.prod(grid))
            if length > len(rest) or not rest[:length].all():
                raise ValueError(f"an image of {length} tokens has fewer in the row")
            found[:, at : at + length] = begin + np.indices(grid).reshape(3, -1)
            begin += max(grid[1:])
        at += length
    return found, begin


ParseRecord = Callable[[dict[str, Any]], RecordWithImages[Any]]
MAX_IMAGES = 10_000
"""Maximum number of different images that are counted."""
STATISTICS_FILE = "statistics.json"


def compute_image_stats(source: Source, parse: ParseRecord, threads: int = 1) -> tuple[list[float], list[float]]:
    """Return (mean, standard deviation) per channel over all pixels, in 0..1; cached.

    Raises DataError if the source has no readable image.
    """
    found = _find_images(source, parse)

    def build(folder: Path) -> None:
        with ThreadPoolExecutor(threads) as pool:
            counts = sum(pool.map(partial(_channel_histogram, source, parse), found.values()), np.zeros((3, 256)))
        # Bad images count as zeros; only a source without any good image is an error.
        if not counts.any():
            raise DataError(
                "model.processor.normalize: no record of data.train has an image that can be read; leave it out"
            )
        mean, std = _mean_and_std(counts)
        (folder / STATISTICS_FILE).write_text(json.dumps([mean.round(6).tolist(), std.round(6).tolist()]))

    def load(folder: Path) -> tuple[list[float], list[float]]:
        mean, std = read_cached_json(folder / STATISTICS_FILE)
        return mean, std

    return get_or_build("image_statistics", {"images": [*found], "most": MAX_IMAGES, "format": 2}, build, load)


def _find_images(source: Source, parse: ParseRecord) -> dict[str, tuple[int, int]]:
    """Return image key -> (index of its record, index of the image there), each image once."""
    found: dict[str, tuple[int, int]] = {}
    for index in range(len(source)):
        try:
            for at, value in enumerate(parse(source[index]).images):
                found.setdefault(_image_key(resolve_image(value, source.get_base_dir(index))), (index, at))
        except BadRecord:
            continue  # reported when the examples are encoded
        if len(found) >= MAX_IMAGES:
            break
    return dict([*found.items()][:MAX_IMAGES])


def _image_key(image: Path | bytes) -> str:
    """Return a key that changes with the image's content: a hash, or path, size and time of the file."""
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    try:
        found = image.stat()
    except (OSError, ValueError):
        return str(image)
    return f"{image.absolute()} {found.st_size} {found.st_mtime_ns}"


def _channel_histogram(source: Source, parse: ParseRecord, position: tuple[int, int]) -> np.ndarray:
    """Return the pixel count per channel and value, (3, 256); zeros for an unreadable image."""
    index, at = position
    try:
        image = resolve_image(parse(source[index]).images[at], source.get_base_dir(index))
        return np.array(read_image(image).histogram(), dtype=np.float64).reshape(3, 256)
    except BadRecord:
        return np.zeros((3, 256))


def _mean_and_std(histogram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation per channel, (3,) each, of a histogram (3, 256)."""
    levels = np.arange(256) / 255
    mean = histogram @ levels / histogram.sum(1)
    square = histogram @ levels**2 / histogram.sum(1)
    # Not below 1e-4, so that images of a single colour do not divide by zero.
    return mean, np.sqrt(np.maximum(square - mean**2, 1e-8))
