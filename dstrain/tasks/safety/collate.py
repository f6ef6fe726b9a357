"""Order, weight and corrupted images of the examples of one batch."""

# Shapes: B pairs.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstrain.tasks.safety.corrupted_images import corrupt_image
from dstrain.tasks.safety.dataset import column_names
from dstrain.tasks.safety.options import SafetyOptions
from dstrain.tasks.safety.ordering import PairOrder, order_pairs

if TYPE_CHECKING:
    from PIL.Image import Image

Examples = Sequence[Mapping[str, Any]]


def order_examples(examples: Examples, options: SafetyOptions) -> PairOrder | None:
    """Return the order of the pairs; None where it is the data's, or is not known before the step."""
    names = column_names(options)
    if options.method == "none" or not names or any(name not in examples[0] for name in names):
        return None
    import numpy as np

    columns = {name: np.array([example[name] for example in examples]) for name in names}
    return order_pairs(columns, options.harmless_threshold)


def count_selected(examples: Examples, options: SafetyOptions) -> int:
    """Return the number of pairs that the loss sums over; all where that is not known before the step."""
    order = order_examples(examples, options)
    return len(examples) if order is None else int(order.keep.sum())


def preferred_sides(examples: Examples, options: SafetyOptions) -> list[str]:
    """Return the column of the preferred answer of each pair: chosen or rejected."""
    order = order_examples(examples, options)
    swap = [False] * len(examples) if order is None else order.swap.tolist()
    return ["rejected" if one else "chosen" for one in swap]


def pairs_with_images(examples: Examples) -> list[int]:
    """Return the positions in the batch of the pairs that have images."""
    return [index for index, example in enumerate(examples) if example.get("images")]


def corrupt_images(images: Sequence[Image], examples: Examples, options: SafetyOptions, seed: int) -> list[Image]:
    """Return a corrupted copy of each image; `images` are those of the examples, one example after another."""
    keys = [(seed, example["sample"], at) for example in examples for at in range(len(example["images"]))]
    return [corrupt_image(image, key, options.crop_max_area) for image, key in zip(images, keys, strict=True)]
