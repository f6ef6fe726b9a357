from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dstrain.data.vision.image_index import downscale_if_equivalent

transformers = pytest.importorskip("transformers")
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil  # noqa: E402
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil  # noqa: E402
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil  # noqa: E402
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil  # noqa: E402
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil  # noqa: E402

SIZES = [(640, 480), (480, 640), (641, 479), (300, 301), (65, 64), (1000, 70)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (height, width, 3), dtype=np.uint8))


def clip(**settings) -> Any:
    return CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}, **settings)


def siglip(**settings) -> Any:
    return SiglipImageProcessorPil(size={"height": 64, "width": 64}, **settings)


def gemma(**settings) -> Any:
    return Gemma3ImageProcessorPil(size={"height": 64, "width": 64}, **settings)


def idefics(longest: int, tile: int, **settings) -> Any:
    edges = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return Idefics3ImageProcessorPil(**edges, **settings)


def flat(made: Any) -> list[np.ndarray]:
    if isinstance(made, Mapping):
        return [array for key in sorted(made) for array in flat(made[key])]
    return [array for one in made for array in flat(one)] if isinstance(made, list) else [np.asarray(made)]


def test_what_is_saved_is_shown():
    """640x480 at a 64-pixel processor."""
    image = noise(640, 480)
    assert downscale_if_equivalent(image, clip()).size == (64, 64)
    assert downscale_if_equivalent(image, clip(do_center_crop=False)).size == (85, 64)
    assert downscale_if_equivalent(image, siglip()).size == (64, 64)
    assert downscale_if_equivalent(image, gemma()).size == (64, 64)
    assert downscale_if_equivalent(image, idefics(128, 64)).size == (128, 96)
    assert downscale_if_equivalent(image, idefics(64, 64)).size == (64, 48)


PROCESSORS = {
    "crop": clip(),
    "plain": siglip(),
    "gemma": gemma(),
    "split": idefics(128, 64, do_image_splitting=True),
    "whole": idefics(128, 64, do_image_splitting=False),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_processor_makes_the_very_same_of_the_smaller_image(name, size):
    processor, image = PROCESSORS[name], noise(*size)
    smaller = downscale_if_equivalent(image, processor)
    if smaller is None:
        return
    assert smaller.width * smaller.height < image.width * image.height
    settings = {"return_row_col_info": True} if name in ("split", "whole") else {}
    before, after = processor(image, **settings), processor(smaller, **settings)
    assert {*before} == {*after}
    for one, other in zip(flat(before), flat(after), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", PROCESSORS)
def test_photographs_are_made_smaller_by_every_kind(name):
    assert all(downscale_if_equivalent(noise(*size), PROCESSORS[name]) is not None for size in SIZES[:4])


def test_nothing_is_kept_where_nothing_is_gained_or_another_image_would_be_seen():
    image = noise(60, 60)
    assert downscale_if_equivalent(image, clip()) is None
    assert downscale_if_equivalent(noise(64, 64), siglip()) is None
    assert downscale_if_equivalent(image, idefics(128, 64)) is None
    panned = gemma(
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=32,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    assert downscale_if_equivalent(noise(640, 300), panned) is None
    assert downscale_if_equivalent(noise(640, 640), panned).size == (64, 64)
    tiled = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=[[64, 32], [32, 64]]
    )
    assert downscale_if_equivalent(noise(640, 480), tiled) is None  # it tells the model the image's own size


def test_the_processor_is_left_as_it_was():
    processor = idefics(128, 64)
    before = dict(vars(processor))
    downscale_if_equivalent(noise(640, 480), processor)
    assert vars(processor) == before
    assert "rows" not in processor(noise(64, 64))


class Strict:
    """Takes images of one shape alone, and scales without a method of its own."""

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        if image.width < 100:
            raise ValueError("too small for me")
        return {"pixel_values": [np.asarray(self.resize(image))]}

    def resize(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.resize((32, 32)))


def test_a_processor_that_refuses_its_own_result_keeps_the_image():
    assert downscale_if_equivalent(noise(200, 100), Strict()) is None


def test_what_the_processor_says_of_the_image_itself_is_not_swallowed():
    with pytest.raises(ValueError, match="too small for me"):
        downscale_if_equivalent(noise(50, 50), Strict())
