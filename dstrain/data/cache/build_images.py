"""Records with images as examples: every image decoded once, on several threads, its tokens counted, its place noted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dstrain.data.cache.build import Encode, Example
from dstrain.data.cache.token_store import WithFiles, cache_root
from dstrain.data.formats.image_placeholders import Seen, read_seen
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.prompts import Asked, Prompt, encode_prompts
from dstrain.data.sources.open import Source
from dstrain.data.vision.expansion import Views
from dstrain.data.vision.image_index import AlbumWriter, Picture
from dstrain.data.vision.image_io import locate_image, read_image
from dstrain.data.vision.processor import Sight

EncodeSeen = Callable[[list[Any], Views | None], Sequence[Example]]
"""What records say, and how their images stand in the texts (None: the model sees none) -> an example or fault of each."""
MOST_THREADS = 8
"""That look at images at once, each with one of them in memory; Pillow lets go of the interpreter while it decodes."""


@dataclass(frozen=True)
class Look:
    """What one record says, and what it shows."""

    seen: Seen[Any]
    pictures: tuple[Picture, ...]
    texts: list[str]
    """What stands for each image in a text."""


@dataclass(frozen=True)
class Eyes:
    """A processor, and the album that a preparation fills."""

    sight: Sight
    album: AlbumWriter
    threads: int = 1

    @classmethod
    def with_album(cls, sight: Sight, cores: int) -> Eyes:
        """Eyes with an empty album; smaller copies of images lie in the cache, apart for each way to make them."""
        place = cache_root() / "images" / _way_of_copies(sight.processor.image_processor)
        return cls(sight, AlbumWriter(sight.settle, place), min(cores, MOST_THREADS))

    def encoder(self, source: Source, read: Callable[[Mapping[str, Any]], Any], encode: EncodeSeen) -> Encode:
        """An `Encode` whose examples have a column `images`, places in the album that it leaves beside them."""
        look = partial(self._look, source, read)
        pool = ThreadPoolExecutor(self.threads)  # one for all chunks: a thread's copy of the processor is dear

        def encode_rows(rows: list[tuple[int, dict[str, Any]]]) -> list[Example]:
            found = list(pool.map(look, rows))
            good = [item for item in found if isinstance(item, Look)]
            coded = iter(encode([item.seen.said for item in good], Views(self.sight, [item.texts for item in good])))
            return [self._placed(next(coded), item.pictures) if isinstance(item, Look) else item for item in found]

        def leave(folder: Path) -> list[str]:
            pool.shutdown()
            return self.album.write(folder)

        return WithFiles(encode_rows, leave)

    def _look(
        self, source: Source, read: Callable[[Mapping[str, Any]], Any], row: tuple[int, dict[str, Any]]
    ) -> Look | BadRecord:
        """Thread-safe."""
        index, record = row
        try:
            seen = read_seen(record, read)
            pictures = tuple(self.album.look(value, source.folder_of(index)) for value in seen.images)
            return Look(seen, pictures, [self.sight.text_of(picture.size) for picture in pictures])
        except BadRecord as fault:
            return fault

    def _placed(self, example: Example, pictures: Sequence[Picture]) -> Example:
        """Records come here in their order, and so the album's numbers are the same however many threads there are."""
        if isinstance(example, BadRecord):
            return example
        return {**example, "images": [self.album.number(picture) for picture in pictures]}


def _way_of_copies(image_processor: Any) -> str:
    """A hash of all that decides which smaller copy stands for an image: the same whatever the tokenizer is."""
    kind = type(image_processor)
    made_by = [f"{name} {'.'.join(version(name).split('.')[:2])}" for name in ("pillow", "transformers")]
    parts = [f"{kind.__module__}.{kind.__qualname__}", image_processor.to_json_string(), *made_by]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def look_at_prompts(
    sight: Sight, asked: Sequence[Seen[Asked]], folders: Sequence[Path], limit: int | None = None
) -> list[Prompt | BadRecord]:
    """What records ask, with the images that they name; a fault where one of them cannot be used."""
    found = [_located(sight, *one) for one in zip(asked, folders, strict=True)]
    good = [one for one in found if not isinstance(one, BadRecord)]
    views = Views(sight, [texts for _, _, texts in good])
    coded = iter(encode_prompts(sight.tokenizer, [said for said, _, _ in good], limit, views))
    prompts: list[Prompt | BadRecord] = []
    for one in found:
        made = one if isinstance(one, BadRecord) else next(coded)
        prompts.append(
            made if isinstance(one, BadRecord) or isinstance(made, BadRecord) else replace(made, images=one[1])
        )
    return prompts


def _located(
    sight: Sight, asked: Seen[Asked], folder: Path
) -> tuple[Asked, tuple[Path | bytes, ...], list[str]] | BadRecord:
    """What is asked, where its images are, and what stands for them in a text."""
    try:
        images = tuple(locate_image(value, folder) for value in asked.images)
        return asked.said, images, [sight.text_of(read_image(image).size) for image in images]
    except BadRecord as fault:
        return fault
