"""Channel means and standard deviations of images, for models trained from scratch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache import get_or_build
from dstrain.data.formats.image_placeholders import RecordWithImages
from dstrain.data.records import BadRecord
from dstrain.data.sources.base import Source
from dstrain.data.vision.image_io import read_image, resolve_image
from dstrain.errors import DataError

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
        mean, std = json.loads((folder / STATISTICS_FILE).read_text())
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
