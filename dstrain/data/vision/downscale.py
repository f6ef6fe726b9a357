"""A smaller image of which a model's image processor makes the very same: decoding and scaling are then done once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_RESIZE_METHODS = ("resize", "center_crop")
"""Methods of transformers' image processors that make an image smaller before its numbers are scaled."""


def downscale_if_equivalent(image: Image, image_processor: Any) -> Image | None:
    """The RGB image as it is after the processor's own resize, or crop, the smaller one first; None where none will do.

    It has fewer pixels, and every tensor that the processor makes of it is bit-equal to the one it makes of `image`.
    Raises what the processor raises of `image`.
    """
    watched, seen = _make_recording_copy(image_processor)
    wanted = watched(image)
    for pixels in sorted(seen.values(), key=lambda pixels: pixels.shape[0] * pixels.shape[1]):
        if pixels.shape[0] * pixels.shape[1] < image.width * image.height and min(pixels.shape[:2]) > 1:
            smaller = _to_image(pixels)
            if _has_same_output(watched, smaller, wanted):
                return smaller
    return None


def _make_recording_copy(image_processor: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A copy that tells all it can, and, once it has run, what the first call of each step returned: (H, W, 3) uint8."""
    watched, seen = copy.copy(image_processor), dict[str, np.ndarray]()
    for name in dir(type(image_processor)):
        if name.startswith("return_") and getattr(watched, name, None) is False:
            setattr(watched, name, True)  # rows and columns of tiles, for instance
    for name in _RESIZE_METHODS:
        if callable(getattr(image_processor, name, None)):
            setattr(watched, name, _record_output(getattr(watched, name), name, seen))
    return watched, seen


def _record_output(method: Callable[..., Any], name: str, outputs: dict[str, np.ndarray]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        made = method(*args, **kwargs)
        if name not in outputs and (pixels := _to_pixels(made)) is not None:
            outputs[name] = pixels
        return made

    return wrapper


def _to_pixels(output: Any) -> np.ndarray | None:
    """(H, W, 3) uint8 of one image that a processor holds; None where it is no such thing."""
    pixels = np.asarray(output)
    if pixels.ndim == 4 and len(pixels) == 1:  # a batch of one
        pixels = pixels[0]
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        return None
    if pixels.shape[0] == 3:
        pixels = pixels.transpose(1, 2, 0)
    return pixels.copy() if pixels.shape[2] == 3 else None


def _to_image(pixels: np.ndarray) -> Image:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels))


def _has_same_output(processor: Any, image: Image, expected: Any) -> bool:
    try:
        return _is_equal(processor(image), expected)
    except Exception:  # too small for it, or of a shape that it does not take
        return False


def _is_equal(actual: Any, expected: Any) -> bool:
    """Whether both hold the same numbers, bit by bit, in the same shapes and types."""
    if isinstance(expected, Mapping):  # BatchFeature is one
        return {*actual} == {*expected} and all(_is_equal(actual[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(_is_equal(*pair) for pair in zip(actual, expected, strict=True))
    left, right = np.asarray(actual), np.asarray(expected)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
