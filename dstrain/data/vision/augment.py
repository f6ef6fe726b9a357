"""Images of training seen otherwise each time: random numbers fixed by the seed and the sample's place in the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dstrain.data.rng import IMAGE_STREAM, make_random_state

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation:
    """What happens to an image before the model's processor sees it."""

    random_translate: bool
    """Move what stands on a background of one colour to a random place in the frame; other images stay."""
    flip_probability: float
    """Chance of a mirror image, left for right, from 0 to 1."""
    seed: int

    def __call__(self, image: Image, sample_position: int, image_no: int) -> Image:
        """Image `which` of the sample at this place in the run's order: the same for the same three, in any split."""
        from PIL import Image

        chance = make_random_state((self.seed, IMAGE_STREAM, sample_position, image_no))
        pixels = before = np.asarray(image)
        if chance.random_sample() < self.flip_probability:
            pixels = pixels[:, ::-1]
        if self.random_translate:
            pixels = translate_foreground(pixels, *chance.random_sample(2))
        return image if pixels is before else Image.fromarray(np.ascontiguousarray(pixels))


def translate_foreground(pixels: np.ndarray, down: float, right: float) -> np.ndarray:
    """What differs from the border's one colour, moved whole; the same array where the border has several.

    pixels (H, W, 3) uint8; `down` and `right` in [0, 1) choose among the places where it is within the frame.
    """
    ground = pixels[0, 0]
    if any((edge != ground).any() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])):
        return pixels
    differs = (pixels != ground).any(axis=-1)  # (H, W)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    if not len(rows):
        return pixels
    found = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    top = int(down * (len(pixels) - len(found) + 1))
    left = int(right * (pixels.shape[1] - found.shape[1] + 1))
    moved = np.empty_like(pixels)
    moved[:] = ground
    moved[top : top + len(found), left : left + found.shape[1]] = found
    return moved
