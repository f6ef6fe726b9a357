"""Residues of a chain that are hidden from the model, drawn from seed and sample."""

# Shapes: L residues of the window.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dstrain.data.rng import RESIDUE_STREAM, make_random_state
from dstrain.data.structures.chain import Chain

MaskMode = Literal["separate", "together"]


@dataclass(frozen=True)
class MaskedChain:
    """A window of a chain, and which of its residues are hidden."""

    chain: Chain
    hides_type: np.ndarray
    """(L,) bool: the type is hidden and has to be predicted."""
    hides_coordinates: np.ndarray
    """(L,) bool: the backbone is hidden and has to be predicted."""


@dataclass(frozen=True)
class ResidueMask:
    """How residues are hidden, and the longest window of a chain."""

    ratio: float
    mode: MaskMode
    max_length: int
    seed: int

    def apply(self, chain: Chain, key: tuple[int, ...]) -> MaskedChain:
        """Return a window of the chain with hidden residues, fixed by the seed and the key.

        Two residues at least have to be known and complete. One type and one backbone at least are hidden, and one
        complete backbone is shown.
        """
        random = make_random_state((self.seed, RESIDUE_STREAM, *key))
        chain = self._choose_window(chain, random)
        complete, known = np.flatnonzero(chain.is_complete), np.flatnonzero(chain.is_known)
        if self.mode == "together":
            known = np.intersect1d(complete, known)
        count = self._count(len(known), len(known) - (self.mode == "together" and len(known) == len(complete)))
        types = random.permutation(known)[:count]
        backbones = types
        if self.mode == "separate":
            # No more backbones than types: the number of types is the weight of a batch.
            backbones = random.permutation(complete)[: min(count, self._count(len(complete), len(complete) - 1))]
        return MaskedChain(chain, _as_mask(types, chain), _as_mask(backbones, chain))

    def _count(self, size: int, limit: int) -> int:
        return max(1, min(round(self.ratio * size), limit))

    def _choose_window(self, chain: Chain, random: np.random.RandomState) -> Chain:
        """Return a random window with two residues that are known and complete, next to one another among those."""
        if len(chain.types) <= self.max_length:
            return chain
        usable = np.flatnonzero(chain.is_complete & chain.is_known)
        # Pairs farther apart than the window are rare: chains with long stretches without a backbone.
        pairs = np.flatnonzero(np.diff(usable) < self.max_length)
        at = pairs[random.randint(len(pairs))] if len(pairs) else 0
        first, last = usable[at], usable[at + 1]
        low, high = max(0, last - self.max_length + 1), min(first, len(chain.types) - self.max_length)
        return chain.window(int(low + random.randint(max(high - low, 0) + 1)), self.max_length)


def _as_mask(indices: np.ndarray, chain: Chain) -> np.ndarray:
    mask = np.zeros(len(chain.types), dtype=bool)
    mask[indices] = True
    return mask
