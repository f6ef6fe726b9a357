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

from dstrain.cache_dir import cache_root
from dstrain.data.cache.token_store import WithExtraFiles
from dstrain.data.encoding.prompts import EncodedPrompt, encode_prompts
from dstrain.data.formats.image_placeholders import RecordWithImages, read_with_images
from dstrain.data.formats.prompts import ParsedPrompt
from dstrain.data.records import BadRecord, Encode, EncodeResult
from dstrain.data.sources.base import Source
from dstrain.data.vision.expansion import PlaceholderExpansion
from dstrain.data.vision.image_index import ImageEntry
from dstrain.data.vision.image_index_writer import ImageIndexWriter
from dstrain.data.vision.image_io import read_image, resolve_image
from dstrain.data.vision.processor import VisionProcessor

EncodeParsed = Callable[[list[Any], PlaceholderExpansion | None], Sequence[EncodeResult]]
"""What records say, and how their images stand in the texts (None: the model sees none) -> an example or fault of each."""
MAX_THREADS = 8
"""That look at images at once, each with one of them in memory; Pillow lets go of the interpreter while it decodes."""


@dataclass(frozen=True)
class LoadedRecord:
    """What one record says, and what it shows."""

    record: RecordWithImages[Any]
    entries: tuple[ImageEntry, ...]
    image_texts: list[str]
    """What stands for each image in a text."""


@dataclass(frozen=True)
class ImageRecordEncoder:
    """A processor, and the album that a preparation fills."""

    vision_processor: VisionProcessor
    index_writer: ImageIndexWriter
    threads: int = 1

    @classmethod
    def create(cls, vision_processor: VisionProcessor, max_threads: int) -> ImageRecordEncoder:
        """Eyes with an empty album; smaller copies of images lie in the cache, apart for each way to make them."""
        place = cache_root() / "images" / _downscale_fingerprint(vision_processor.hf_processor.image_processor)
        return cls(vision_processor, ImageIndexWriter(vision_processor.downscale, place), min(max_threads, MAX_THREADS))

    def make_encode(self, source: Source, parse: Callable[[Mapping[str, Any]], Any], encode: EncodeParsed) -> Encode:
        """An `Encode` whose examples have a column `images`, places in the album that it leaves beside them."""
        look = partial(self._load_record, source, parse)
        pool = ThreadPoolExecutor(self.threads)  # one for all chunks: a thread's copy of the processor is dear

        def encode_rows(rows: list[tuple[int, dict[str, Any]]]) -> list[EncodeResult]:
            found = list(pool.map(look, rows))
            good = [item for item in found if isinstance(item, LoadedRecord)]
            coded = iter(
                encode(
                    [item.record.parsed for item in good],
                    PlaceholderExpansion(self.vision_processor, [item.image_texts for item in good]),
                )
            )
            return [
                self._add_image_positions(next(coded), item.entries) if isinstance(item, LoadedRecord) else item
                for item in found
            ]

        def write_index(folder: Path) -> list[str]:
            pool.shutdown()
            return self.index_writer.write(folder)

        return WithExtraFiles(encode_rows, write_index)

    def _load_record(
        self, source: Source, parse: Callable[[Mapping[str, Any]], Any], row: tuple[int, dict[str, Any]]
    ) -> LoadedRecord | BadRecord:
        """Thread-safe."""
        index, record = row
        try:
            seen = read_with_images(record, parse)
            pictures = tuple(self.index_writer.get_entry(value, source.get_base_dir(index)) for value in seen.images)
            return LoadedRecord(
                seen, pictures, [self.vision_processor.get_image_text(picture.size) for picture in pictures]
            )
        except BadRecord as fault:
            return fault

    def _add_image_positions(self, example: EncodeResult, entries: Sequence[ImageEntry]) -> EncodeResult:
        """Records come here in their order, and so the album's numbers are the same however many threads there are."""
        if isinstance(example, BadRecord):
            return example
        return {**example, "images": [self.index_writer.assign_position(picture) for picture in entries]}


def _downscale_fingerprint(image_processor: Any) -> str:
    """A hash of all that decides which smaller copy stands for an image: the same whatever the tokenizer is."""
    kind = type(image_processor)
    made_by = [f"{name} {'.'.join(version(name).split('.')[:2])}" for name in ("pillow", "transformers")]
    parts = [f"{kind.__module__}.{kind.__qualname__}", image_processor.to_json_string(), *made_by]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def encode_image_prompts(
    vision_processor: VisionProcessor,
    parsed_prompts: Sequence[RecordWithImages[ParsedPrompt]],
    folders: Sequence[Path],
    max_length: int | None = None,
) -> list[EncodedPrompt | BadRecord]:
    """What records ask, with the images that they name; a fault where one of them cannot be used."""
    found = [_load_prompt(vision_processor, *one) for one in zip(parsed_prompts, folders, strict=True)]
    good = [one for one in found if not isinstance(one, BadRecord)]
    views = PlaceholderExpansion(vision_processor, [texts for _, _, texts in good])
    coded = iter(encode_prompts(vision_processor.tokenizer, [said for said, _, _ in good], max_length, views))
    prompts: list[EncodedPrompt | BadRecord] = []
    for one in found:
        made = one if isinstance(one, BadRecord) else next(coded)
        prompts.append(
            made if isinstance(one, BadRecord) or isinstance(made, BadRecord) else replace(made, images=one[1])
        )
    return prompts


def _load_prompt(
    vision_processor: VisionProcessor, parsed_prompt: RecordWithImages[ParsedPrompt], folder: Path
) -> tuple[ParsedPrompt, tuple[Path | bytes, ...], list[str]] | BadRecord:
    """What is asked, where its images are, and what stands for them in a text."""
    try:
        images = tuple(resolve_image(value, folder) for value in parsed_prompt.images)
        return (
            parsed_prompt.parsed,
            images,
            [vision_processor.get_image_text(read_image(image).size) for image in images],
        )
    except BadRecord as fault:
        return fault
