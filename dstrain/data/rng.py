"""Seeded random numbers: a stream for each purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

RECORD_STREAM, EPOCH_STREAM = 1, 2
"""Order of the records of a source; order of the samples of an epoch."""
IMAGE_STREAM = 4
"""Augmentation of images."""
CORRUPTION_STREAM = 6
"""Corrupted copies of images, which a loss compares with the images."""
RESIDUE_STREAM = 7
"""Windows of protein chains, and the residues that are hidden."""


def make_random_state(key: Sequence[int]) -> np.random.RandomState:
    """Return a generator fixed by the key, such as (seed, stream, epoch); its numbers are below 2**64.

    RandomState, because NEP 19 freezes its stream for all versions of numpy.
    """
    import numpy as np

    return np.random.RandomState([word for number in key for word in (number % 2**32, number // 2**32 % 2**32)])
