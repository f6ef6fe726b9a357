"""Downscaling of images to the smallest one with the same processor output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_RESIZE_METHODS = ("resize", "center_crop")
"""Methods of transformers' image processors that reduce an image before its values are normalized."""


def downscale_if_equivalent(image: Image, image_processor: Any) -> Image | None:
    """Return the RGB image after the processor's own resize or crop, if that is equivalent.

    It has fewer pixels, and every tensor that the processor makes of it is bit-equal to that of
    `image`, so that decoding and scaling are done once, when data is prepared. None if there is no
    such image. Raises the processor's errors for `image`.
    """
    recording, recorded = _make_recording_copy(image_processor)
    expected = recording(image)
    # The smallest equivalent image saves most disk space and decoding time.
    for pixels in sorted(recorded.values(), key=lambda pixels: pixels.shape[0] * pixels.shape[1]):
        # An image of one row or column would be refused when the copy is read.
        if pixels.shape[0] * pixels.shape[1] < image.width * image.height and min(pixels.shape[:2]) > 1:
            smaller = _to_image(pixels)
            if _has_same_output(recording, smaller, expected):
                return smaller
    return None


def _make_recording_copy(image_processor: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a copy with all optional outputs, and a dict for the first result of each resize method.

    A call of the copy fills the dict: method -> (H, W, 3) uint8.
    """
    recording, recorded = copy.copy(image_processor), dict[str, np.ndarray]()
    for name in dir(type(image_processor)):
        if name.startswith("return_") and getattr(recording, name, None) is False:
            setattr(recording, name, True)  # such as rows and columns of tiles, which must be equal too
    for name in _RESIZE_METHODS:
        if callable(getattr(image_processor, name, None)):
            setattr(recording, name, _record_output(getattr(recording, name), name, recorded))
    return recording, recorded


def _record_output(method: Callable[..., Any], name: str, outputs: dict[str, np.ndarray]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if name not in outputs and (pixels := _to_pixels(result)) is not None:
            outputs[name] = pixels
        return result

    return wrapper


def _to_pixels(output: Any) -> np.ndarray | None:
    """Return a processor's image as (H, W, 3) uint8; None if the value is not a single RGB image."""
    pixels = np.asarray(output)
    if pixels.ndim == 4 and len(pixels) == 1:  # a batch of one
        pixels = pixels[0]
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        return None
    if pixels.shape[0] == 3:
        # Some processors put channels first.
        pixels = pixels.transpose(1, 2, 0)
    return pixels.copy() if pixels.shape[2] == 3 else None


def _to_image(pixels: np.ndarray) -> Image:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels))


def _has_same_output(processor: Any, image: Image, expected: Any) -> bool:
    try:
        return _is_equal(processor(image), expected)
    except Exception:  # the image is too small for it, or of a shape that it rejects
        return False


def _is_equal(actual: Any, expected: Any) -> bool:
    """Return whether both have the same values, bit by bit, in the same shapes and types."""
    if isinstance(expected, Mapping):  # includes transformers' BatchFeature
        return {*actual} == {*expected} and all(_is_equal(actual[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(_is_equal(*pair) for pair in zip(actual, expected, strict=True))
    left, right = np.asarray(actual), np.asarray(expected)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
