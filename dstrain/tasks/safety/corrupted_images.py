"""Corrupted copies of images, which mDPO compares with the images: a random crop, enlarged to the image's size."""

# Shapes of images: W width, H height.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dstrain.data.rng import CORRUPTION_STREAM, make_random_state
from dstrain.tasks.safety.options import MIN_CROP_AREA

if TYPE_CHECKING:
    from PIL.Image import Image

CORRUPTION_VERSION = 1
"""Increase it when the same seed and sample give another image, so that cached reference outputs are ignored."""


def corrupt_image(image: Image, key: Sequence[int], max_area: float) -> Image:
    """Return a random part of the image in the image's own size, so that it has as many image tokens.

    mDPO, Wang et al. (arXiv 2406.11839), crops to at most 20 %. As in the authors' code (luka-group/mDPO, `crop_images`
    of modeling_bunny_phi.py: torchvision's RandomResizedCrop, scale 0.01 to 0.2) the share of the area is uniform from
    0.01 to `max_area`, and the place is uniform. Theirs draws an aspect ratio from 3/4 to 4/3, and a new crop in each
    step, of the processed pixels; this one keeps the ratio of the image, and `key` (seed, sample, number of the image)
    fixes it, so a cached reference sees the same image as the policy.
    """
    from PIL.Image import Resampling

    seed, sample, number = key
    share, left, top = make_random_state((seed, CORRUPTION_STREAM, sample, number)).random_sample(3)
    side = math.sqrt(MIN_CROP_AREA + share * (max_area - MIN_CROP_AREA))
    width, height = (max(1, round(side * length)) for length in image.size)
    x, y = int(left * (image.width - width + 1)), int(top * (image.height - height + 1))
    return image.resize(image.size, Resampling.BICUBIC, box=(x, y, x + width, y + height))
