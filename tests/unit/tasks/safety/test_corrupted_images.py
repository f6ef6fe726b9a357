"""A corrupted image is a random part of the image, in its size, fixed by seed, sample and number."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dstrain.tasks.safety.pair_task import corrupt_image
from tests.vision_recipes import picture


@pytest.mark.parametrize("size", [(60, 40), (7, 300), (1, 1), (640, 480)])
def test_it_has_the_size_of_the_image(size: tuple[int, int]) -> None:
    assert corrupt_image(picture(0, size), (0, 3, 0), 0.2).size == size


def test_it_is_fixed_by_its_key() -> None:
    image = picture(1)
    pixels = [
        np.asarray(corrupt_image(image, key, 0.2)) for key in ((0, 3, 0), (0, 3, 0), (1, 3, 0), (0, 4, 0), (0, 3, 1))
    ]
    assert (pixels[0] == pixels[1]).all()
    assert all((pixels[0] != other).any() for other in pixels[2:])


def test_it_shows_at_most_the_share_that_is_allowed() -> None:
    """The red channel counts columns, the green one rows: their ranges are the sides of the crop."""
    columns, rows = np.meshgrid(np.arange(200), np.arange(200))
    image = Image.fromarray(np.stack([columns, rows, columns], -1).astype(np.uint8))
    shares = []
    for sample in range(200):
        pixels = np.asarray(corrupt_image(image, (0, sample, 0), 0.2)).astype(int)
        sides = [np.ptp(pixels[..., channel]) + 1 for channel in (0, 1)]
        shares.append(sides[0] * sides[1] / 200**2)
    assert max(shares) <= 0.2 * 1.05, "rounded to pixels"
    assert min(shares) >= 0.01 * 0.8
    assert np.mean(shares) == pytest.approx(0.105, abs=0.01), "uniform between 0.01 and 0.2"


def test_its_place_is_anywhere() -> None:
    columns, _ = np.meshgrid(np.arange(200), np.arange(200))
    image = Image.fromarray(np.stack([columns] * 3, -1).astype(np.uint8))
    shown = {
        column for sample in range(100) for column in np.unique(np.asarray(corrupt_image(image, (0, sample, 0), 0.2)))
    }
    assert min(shown) < 5
    assert max(shown) > 194
