from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dstrain.tasks.vlm import ImageAugmentation

GROUND = (250, 240, 230)


def shape(width: int = 40, height: int = 30, at: tuple[int, int] = (5, 7)) -> Image.Image:
    """A patch of noise, 9 wide and 6 high, on a plain background."""
    image = Image.new("RGB", (width, height), GROUND)
    image.paste(Image.fromarray(np.random.RandomState(1).randint(0, 200, (6, 9, 3), dtype=np.uint8)), at)
    return image


def noise() -> Image.Image:
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (8, 12, 3), dtype=np.uint8))


def box(image: Image.Image) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((np.asarray(image) != GROUND).any(axis=-1))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def content(image: Image.Image) -> bytes:
    return image.crop(box(image)).tobytes()


def test_an_image_is_a_function_of_seed_place_and_number_alone():
    image, augment = shape(), ImageAugmentation(random_translate=True, flip_probability=0.5, seed=7)
    keys = [(place, which) for place in range(6) for which in range(2)]
    first = {key: augment(image, *key).tobytes() for key in keys}
    for key in reversed(keys):
        assert (
            ImageAugmentation(random_translate=True, flip_probability=0.5, seed=7)(image, *key).tobytes() == first[key]
        )
    assert len(set(first.values())) > 8
    assert ImageAugmentation(random_translate=True, flip_probability=0.5, seed=8)(image, 0, 0).tobytes() != first[0, 0]
    assert augment(image, 2**40, 0).size == image.size


def test_what_is_shown_moves_whole_within_the_frame():
    image, augment = shape(), ImageAugmentation(random_translate=True, flip_probability=0.0, seed=0)
    seen = [augment(image, place, 0) for place in range(400)]
    assert {one.size for one in seen} == {(40, 30)}
    assert {content(one) for one in seen} == {content(image)}
    lefts, tops = {box(one)[0] for one in seen}, {box(one)[1] for one in seen}
    assert lefts == set(range(40 - 9 + 1))
    assert tops == set(range(30 - 6 + 1))


def test_an_image_without_a_plain_border_stays():
    augment = ImageAugmentation(random_translate=True, flip_probability=0.0, seed=0)
    touching = shape(at=(0, 3))
    for image in (noise(), touching):
        assert augment(image, 3, 0) is image
    plain = Image.new("RGB", (9, 9), GROUND)
    assert augment(plain, 3, 0).tobytes() == plain.tobytes()


def test_a_mirror_image_comes_as_often_as_asked():
    image = noise()
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    for share in (0.0, 0.25, 1.0):
        augment = ImageAugmentation(random_translate=False, flip_probability=share, seed=3)
        seen = [augment(image, place, 0).tobytes() for place in range(400)]
        assert set(seen) <= {image.tobytes(), mirrored}
        assert seen.count(mirrored) / 400 == pytest.approx(share, abs=0.06)


def test_a_mirrored_shape_is_moved_too():
    image, augment = shape(), ImageAugmentation(random_translate=True, flip_probability=1.0, seed=0)
    mirrored = content(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert {content(augment(image, place, 1)) for place in range(20)} == {mirrored}


def test_the_stream_is_frozen():
    augment = ImageAugmentation(random_translate=True, flip_probability=0.5, seed=42)
    assert [tuple(map(int, box(augment(shape(), place, 0))[:2])) for place in range(4)] == FROZEN


FROZEN = [(22, 7), (30, 5), (5, 23), (7, 16)]
