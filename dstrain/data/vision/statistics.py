"""The mean and deviation of a source's images, by which a model from scratch sees them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache_dir import key_name, write_whole
from dstrain.data.formats.image_placeholders import Seen
from dstrain.data.formats.messages import BadRecord
from dstrain.data.sources.open import Source
from dstrain.data.vision.image_io import locate_image, read_image
from dstrain.errors import DataError

Convert = Callable[[dict[str, Any]], Seen[Any]]
MOST_IMAGES = 10_000
"""The first so many, each once."""


def image_colours(source: Source, convert: Convert, cache: Path, threads: int = 1) -> tuple[list[float], list[float]]:
    """(mean, deviation) of each channel over all pixels, in shares of the brightest; kept in the cache.

    Raises DataError where the source has no image that can be read.
    """
    found = _find(source, convert)
    key = {"images": [*found], "most": MOST_IMAGES, "format": 2}
    place = cache / "colours" / f"{key_name(key)}.json"
    if place.is_file():
        kept = json.loads(place.read_text())
        return kept["mean"], kept["std"]
    with ThreadPoolExecutor(threads) as pool:
        counts = sum(pool.map(partial(_count, source, convert), found.values()), np.zeros((3, 256)))
    if not counts.any():
        raise DataError(
            "model.processor.normalize: no record of data.train has an image that can be read; leave it out"
        )
    mean, std = _spread(counts)
    made = {"mean": mean.round(6).tolist(), "std": std.round(6).tolist()}
    write_whole(place, json.dumps(made))
    return made["mean"], made["std"]


def _find(source: Source, convert: Convert) -> dict[str, tuple[int, int]]:
    """What tells an image from others, and from what it was -> its record, and its place there."""
    found: dict[str, tuple[int, int]] = {}
    for index in range(len(source)):
        try:
            for at, value in enumerate(convert(source[index]).images):
                found.setdefault(_state(locate_image(value, source.folder_of(index))), (index, at))
        except BadRecord:
            continue  # judged where the examples are made
        if len(found) >= MOST_IMAGES:
            break
    return dict([*found.items()][:MOST_IMAGES])


def _state(image: Path | bytes) -> str:
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    try:
        found = image.stat()
    except (OSError, ValueError):
        return str(image)
    return f"{image.absolute()} {found.st_size} {found.st_mtime_ns}"


def _count(source: Source, convert: Convert, place: tuple[int, int]) -> np.ndarray:
    """(3, 256): how many pixels have each brightness, by channel; none of an image that cannot be read."""
    index, at = place
    try:
        image = locate_image(convert(source[index]).images[at], source.folder_of(index))
        return np.array(read_image(image).histogram(), dtype=np.float64).reshape(3, 256)
    except BadRecord:
        return np.zeros((3, 256))


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each channel."""
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum(1)
    square = counts @ levels**2 / counts.sum(1)
    return mean, np.sqrt(np.maximum(square - mean**2, 1e-8))
