from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from dstrain.tasks.docqa.augment import DocumentAugmentation, add_noise, change_color, crop_page, rotate_page

ALL = {"crop": 0.1, "rotate": 5.0, "noise": 8.0, "color": 0.2}


def make_page(size: tuple[int, int] = (60, 80)) -> Image.Image:
    """A page with dark and coloured lines on white."""
    pixels = np.full((size[1], size[0], 3), 255, dtype=np.uint8)
    pixels[10:-10:6, 8:-8] = (20, 30, 40)
    pixels[13:-10:12, 8:30] = (200, 40, 30)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("ranges", [ALL, *({name: value} for name, value in ALL.items())])
def test_a_page_is_a_function_of_seed_position_and_number_alone(ranges: dict[str, Any]) -> None:
    page = make_page()
    keys = [(position, number) for position in (0, 1, 2**40) for number in range(2)]
    first = {key: DocumentAugmentation(**ranges, seed=7)(page, *key) for key in keys}
    for key in reversed(keys):
        again = DocumentAugmentation(**ranges, seed=7)(page, *key)
        assert (again.size, again.tobytes()) == (first[key].size, first[key].tobytes())
        assert again.mode == "RGB"
    assert len({(made.size, made.tobytes()) for made in first.values()}) == len(keys)
    other = DocumentAugmentation(**ranges, seed=8)(page, 0, 0)
    assert (other.size, other.tobytes()) != (first[0, 0].size, first[0, 0].tobytes())


def test_ranges_of_zero_change_nothing() -> None:
    page = make_page()
    assert DocumentAugmentation(seed=1)(page, 3, 0) is page


def test_a_change_that_is_switched_off_does_not_alter_the_others() -> None:
    page = make_page()
    crop = DocumentAugmentation(crop=0.2, seed=3)
    both = DocumentAugmentation(crop=0.2, noise=3.0, seed=3)
    assert {crop(page, at, 0).size for at in range(5)} == {both(page, at, 0).size for at in range(5)}


@pytest.mark.parametrize(
    "change",
    [{"crop": 0.5}, {"crop": -0.1}, {"rotate": 181.0}, {"noise": -1.0}, {"color": 1.0}, {"color": float("nan")}],
)
def test_a_range_out_of_bounds_is_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(change))} is .*, but it must be between 0 and"):
        DocumentAugmentation(**change, seed=0)


def test_a_crop_cuts_its_share_from_each_side() -> None:
    page = make_page((100, 200))
    made = crop_page(page, np.array([0.1, 0.2, 0.3, 0.05]))
    assert made.size == (60, 150)
    assert made.tobytes() == page.crop((10, 40, 70, 190)).tobytes()
    sizes = {DocumentAugmentation(crop=0.1, seed=0)(page, at, 0).size for at in range(300)}
    assert min(width for width, _ in sizes) >= 80
    assert min(height for _, height in sizes) >= 160
    assert len(sizes) > 100
    tiny = make_page((40, 40)).resize((2, 2))
    assert crop_page(tiny, np.full(4, 0.4)).size == (2, 2)
    assert crop_page(tiny, np.full(4, 0.5)) is tiny


def test_a_turned_page_keeps_its_size_and_has_white_corners() -> None:
    dark = Image.new("RGB", (60, 80))
    made = rotate_page(dark, 30.0)
    assert made.size == (60, 80)
    assert made.getpixel((0, 0)) == (255, 255, 255)
    assert made.getpixel((30, 40)) == (0, 0, 0)
    page = make_page((60, 60))
    assert rotate_page(page, 90.0).tobytes() == page.transpose(Image.Transpose.ROTATE_90).tobytes()


def test_factors_of_one_leave_the_colours() -> None:
    page = make_page()
    assert change_color(page, np.ones(3)).tobytes() == page.tobytes()


def test_brightness_contrast_and_saturation_change_what_they_say() -> None:
    page = Image.fromarray(np.array([[[100, 100, 100], [50, 50, 50]], [[120, 60, 60], [80, 80, 80]]], dtype=np.uint8))
    assert np.asarray(change_color(page, np.array([1.2, 1, 1])))[0].tolist() == [[120] * 3, [60] * 3]
    flat = np.asarray(change_color(page, np.array([1, 0, 1])))
    assert len(np.unique(flat)) == 1, "no contrast: the mean grey level"
    grey = np.asarray(change_color(page, np.array([1, 1, 0])))
    assert (grey[1, 0] == round(0.299 * 120 + 0.587 * 60 + 0.114 * 60)).all()
    assert grey[0].tolist() == np.asarray(page)[0].tolist()


def test_noise_has_the_standard_deviation() -> None:
    flat = Image.new("RGB", (200, 200), (128, 128, 128))
    made = np.asarray(add_noise(flat, 6.0, np.random.RandomState(0)), dtype=np.float64)
    assert abs(made.mean() - 128) < 0.2
    assert abs(made.std() - 6) < 0.1
