"""A smaller image of which a model's image processor makes the very same: decoding and scaling are then done once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_STEPS = ("resize", "center_crop")
"""Methods of transformers' image processors that make an image smaller before its numbers are scaled."""


def settled(image: Image, image_processor: Any) -> Image | None:
    """The RGB image as it is after the processor's own resize, or crop, the smaller one first; None where none will do.

    It has fewer pixels, and every tensor that the processor makes of it is bit-equal to the one it makes of `image`.
    Raises what the processor raises of `image`.
    """
    watched, seen = _watched(image_processor)
    wanted = watched(image)
    for pixels in sorted(seen.values(), key=lambda pixels: pixels.shape[0] * pixels.shape[1]):
        if pixels.shape[0] * pixels.shape[1] < image.width * image.height and min(pixels.shape[:2]) > 1:
            smaller = _as_image(pixels)
            if _makes(watched, smaller, wanted):
                return smaller
    return None


def _watched(image_processor: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A copy that tells all it can, and, once it has run, what the first call of each step returned: (H, W, 3) uint8."""
    watched, seen = copy.copy(image_processor), dict[str, np.ndarray]()
    for name in dir(type(image_processor)):
        if name.startswith("return_") and getattr(watched, name, None) is False:
            setattr(watched, name, True)  # rows and columns of tiles, for instance
    for name in _STEPS:
        if callable(getattr(image_processor, name, None)):
            setattr(watched, name, _noting(getattr(watched, name), name, seen))
    return watched, seen


def _noting(step: Callable[..., Any], name: str, seen: dict[str, np.ndarray]) -> Callable[..., Any]:
    def noted(*args: Any, **settings: Any) -> Any:
        made = step(*args, **settings)
        if name not in seen and (pixels := _pixels(made)) is not None:
            seen[name] = pixels
        return made

    return noted


def _pixels(made: Any) -> np.ndarray | None:
    """(H, W, 3) uint8 of one image that a processor holds; None where it is no such thing."""
    pixels = np.asarray(made)
    if pixels.ndim == 4 and len(pixels) == 1:  # a batch of one
        pixels = pixels[0]
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        return None
    if pixels.shape[0] == 3:
        pixels = pixels.transpose(1, 2, 0)
    return pixels.copy() if pixels.shape[2] == 3 else None


def _as_image(pixels: np.ndarray) -> Image:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels))


def _makes(processor: Any, image: Image, wanted: Any) -> bool:
    try:
        return _equal(processor(image), wanted)
    except Exception:  # too small for it, or of a shape that it does not take
        return False


def _equal(made: Any, wanted: Any) -> bool:
    """Whether both hold the same numbers, bit by bit, in the same shapes and types."""
    if isinstance(wanted, Mapping):  # BatchFeature is one
        return {*made} == {*wanted} and all(_equal(made[key], value) for key, value in wanted.items())
    if isinstance(wanted, list | tuple):
        return len(made) == len(wanted) and all(_equal(*pair) for pair in zip(made, wanted, strict=True))
    left, right = np.asarray(made), np.asarray(wanted)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
