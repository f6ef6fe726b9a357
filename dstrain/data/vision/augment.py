"""Random augmentation of training images, seeded by the sample's position in the run."""

# Shapes of images: H height, W width, 3 channels.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dstrain.data.rng import IMAGE_STREAM, make_random_state

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """Random changes of an image before the model's processor."""

    random_translate: bool
    """Move the content of an image with a border of one colour to a random place; others stay."""
    flip_probability: float
    """Probability of a horizontal flip, from 0 to 1."""
    seed: int

    def __call__(self, image: Image, sample_position: int, image_no: int) -> Image:
        """Return image `image_no` of the sample at a position of the run, augmented.

        Seed, position and number determine the result, whatever the world size.
        """
        from PIL import Image

        random = make_random_state((self.seed, IMAGE_STREAM, sample_position, image_no))
        pixels = before = np.asarray(image)
        if random.random_sample() < self.flip_probability:
            pixels = pixels[:, ::-1]
        if self.random_translate:
            pixels = translate_foreground(pixels, *random.random_sample(2))
        # Unchanged images are returned as they are, without a copy.
        return image if pixels is before else Image.fromarray(np.ascontiguousarray(pixels))


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
