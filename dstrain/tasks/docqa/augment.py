"""Random augmentation of training pages: crop, rotation, colour and noise, seeded by the sample's position."""

# Shapes of images: H height, W width, 3 channels.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dstrain.data.rng import IMAGE_STREAM, make_random_state

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CROP, MAX_COLOR = 0.4, 0.9
"""Bounds of the ranges: more would leave no page, or no colour."""
_LUMA = 0.299, 0.587, 0.114
"""Weights of red, green and blue in the grey level, ITU-R BT.601."""


@dataclass(frozen=True, kw_only=True)
class DocumentAugmentation:
    """Random changes of a page image before the model's processor, as of a photograph or a scan of it."""

    crop: float = 0.0
    """Largest share of width or height that is cut from each side, from 0 to 0.4."""
    rotate: float = 0.0
    """Largest angle in degrees, to both sides, from 0 to 180; the corners become white and the size stays."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise in grey levels, from 0 to 255."""
    color: float = 0.0
    """Largest relative change of brightness, contrast and saturation, from 0 to 0.9."""
    seed: int

    def __post_init__(self) -> None:
        limits = {"crop": MAX_CROP, "rotate": 180.0, "noise": 255.0, "color": MAX_COLOR}
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 0 <= value <= limit:
                raise ValueError(f"{name} is {value:g}, but it must be between 0 and {limit:g}")

    def __call__(self, image: Image, sample_position: int, image_no: int) -> Image:
        """Return page `image_no` of the sample at a position of the run, an RGB image, augmented.

        Seed, position and number determine the result, whatever the world size. Each change has numbers of its
        own, so that one that is switched off does not alter the others.
        """
        key = (self.seed, IMAGE_STREAM, sample_position, image_no)
        result = image
        if self.rotate:
            result = rotate_page(result, make_random_state((*key, 1)).uniform(-self.rotate, self.rotate))
        if self.crop:
            result = crop_page(result, make_random_state((*key, 2)).uniform(0, self.crop, 4))
        if self.color:
            result = change_color(result, make_random_state((*key, 3)).uniform(1 - self.color, 1 + self.color, 3))
        if self.noise:
            result = add_noise(result, self.noise, make_random_state((*key, 4)))
        return result


def rotate_page(image: Image, degrees: float) -> Image:
    """Return the page turned counterclockwise around its centre, with white corners, in the same size."""
    from PIL.Image import Resampling

    return image.rotate(degrees, resample=Resampling.BILINEAR, fillcolor=(255, 255, 255))


def crop_page(image: Image, shares: np.ndarray) -> Image:
    """Return the page without these shares of its left, top, right and bottom side, (4,); two pixels at least stay."""
    left, top, right, bottom = (int(share * size) for share, size in zip(shares, image.size * 2, strict=True))
    box = (left, top, image.width - right, image.height - bottom)
    return image.crop(box) if box[2] - left >= 2 and box[3] - top >= 2 else image


def change_color(image: Image, factors: np.ndarray) -> Image:
    """Return the page with brightness, contrast and saturation multiplied by these factors, (3,).

    Contrast is the distance from the page's mean grey level, saturation the distance from each pixel's own.
    """
    from PIL import Image

    brightness, contrast, saturation = (np.float32(factor) for factor in factors)
    pixels = np.asarray(image, dtype=np.float32) * brightness  # (H, W, 3)
    mean = np.float32(_to_grayscale(pixels).mean(dtype=np.float64))
    pixels = (pixels - mean) * contrast + mean
    grey = _to_grayscale(pixels)[..., None]  # (H, W, 1)
    return Image.fromarray(_to_uint8((pixels - grey) * saturation + grey))


def _to_grayscale(pixels: np.ndarray) -> np.ndarray:
    """Return the grey levels (H, W) of pixels (H, W, 3). No matrix product: its rounding depends on the machine."""
    red, green, blue = (np.float32(weight) * pixels[..., channel] for channel, weight in enumerate(_LUMA))
    return red + green + blue


def add_noise(image: Image, std: float, random: np.random.RandomState) -> Image:
    """Return the page with Gaussian noise of this standard deviation added to each channel of each pixel."""
    from PIL import Image

    pixels = np.asarray(image, dtype=np.float32)
    noise = random.standard_normal(pixels.shape).astype(np.float32)
    return Image.fromarray(_to_uint8(pixels + np.float32(std) * noise))


def _to_uint8(pixels: np.ndarray) -> np.ndarray:
    return pixels.round().clip(0, 255).astype(np.uint8)
