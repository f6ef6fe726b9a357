"""Pillow's switch for truncated images, which other packages turn on."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from PIL import Image, ImageFile

from dstrain.data.vision.image_io import raise_on_truncated_images


def truncated() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    return file.getvalue()[:-1500]


def load() -> None:
    Image.open(io.BytesIO(truncated())).load()


def test_pillow_fills_truncated_images_where_another_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once Pillow has no such switch: then the patch can go."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    load()
    with raise_on_truncated_images(), pytest.raises(OSError, match=r"truncated|broken"):
        load()
    load()


def test_the_switch_is_restored_by_the_last_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    together = Barrier(4)

    def read(index: int) -> bool:
        with raise_on_truncated_images():
            together.wait(10)
            return bool(ImageFile.LOAD_TRUNCATED_IMAGES)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(read, range(4))] == [False] * 4
    assert ImageFile.LOAD_TRUNCATED_IMAGES
