"""Clusters of similar sequences, so that held-out chains have no near copy among those that are trained on."""

# Shapes: N sequences.

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dstrain.cache import get_or_build
from dstrain.data.structures.chain import UNKNOWN
from dstrain.errors import DataError, Fault

CLUSTER_VERSION = 1
"""Increase it when the same sequences get other clusters: cached ones are then ignored."""

WORD_LENGTH = 4
"""Residues of a word; there are 20^4 words, so that unrelated chains share few."""
MIN_SHARED_WORDS = 3
"""Shared words below this count as chance."""
HOLD_OUT_STREAM = 3
"""Stream of random numbers of held-out records, as for text tasks."""


def cluster_sequences(sequences: Sequence[np.ndarray], identity: float) -> np.ndarray:
    """Return the cluster of each sequence of residue types, (N,); sequences of different clusters are not similar.

    Two sequences are similar if they share at least identity^4 of the shorter one's words of 4 residues, and 3 words:
    the expected share where a fraction `identity` of the residues is equal, at random places. Clusters are the
    connected components of similar sequences (single linkage). Copies are found at any length.
    """
    words = [_find_words(sequence) for sequence in sequences]
    first_copy = dict[bytes, int]()
    # Copies are joined first, so that a chain that many entries repeat costs one comparison.
    parents = [first_copy.setdefault(np.asarray(one, np.int32).tobytes(), at) for at, one in enumerate(sequences)]
    unique = [at for at, parent in enumerate(parents) if at == parent]
    holders: dict[int, list[int]] = {}
    for at in unique:
        for other, shared in _count_shared(words[at], holders).items():
            needed = max(MIN_SHARED_WORDS, math.ceil(identity**WORD_LENGTH * min(len(words[at]), len(words[other]))))
            if shared >= needed:
                a, b = _root(parents, at), _root(parents, other)
                parents[max(a, b)] = min(a, b)
        for word in words[at]:
            holders.setdefault(word, []).append(at)
    return np.array([_root(parents, at) for at in range(len(sequences))], dtype=np.int64)


def load_or_cluster(tokens_digest: str, sequences: Sequence[np.ndarray], identity: float) -> np.ndarray:
    """Return `cluster_sequences`, from the cache where it has the clusters of these tokens.

    The time grows with the square of the number of sequences.
    """

    def build(folder: Path) -> None:
        np.save(folder / "clusters.npy", cluster_sequences(sequences, identity))

    def load(folder: Path) -> np.ndarray:
        return np.asarray(np.load(folder / "clusters.npy", allow_pickle=False))

    key = {"tokens": tokens_digest, "identity": identity, "version": CLUSTER_VERSION}
    return get_or_build("clusters", key, build, load)


def _find_words(sequence: np.ndarray) -> list[int]:
    """Return the different words of 4 known residues, as numbers."""
    if len(sequence) < WORD_LENGTH:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(sequence, dtype=np.int64), WORD_LENGTH)
    known = windows[(windows < UNKNOWN).all(1)]
    return [int(word) for word in np.unique(known @ UNKNOWN ** np.arange(WORD_LENGTH))]


def _count_shared(words: Sequence[int], holders: dict[int, list[int]]) -> dict[int, int]:
    """Return the earlier sequences that share words -> how many."""
    found = [np.array(holders[word]) for word in words if word in holders]
    if not found:
        return {}
    others, counts = np.unique(np.concatenate(found), return_counts=True)
    enough = counts >= MIN_SHARED_WORDS
    return {int(other): int(count) for other, count in zip(others[enough], counts[enough], strict=True)}


def _root(parents: list[int], at: int) -> int:
    while parents[at] != at:
        parents[at] = parents[parents[at]]
        at = parents[at]
    return at


def choose_eval_chains(clusters: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Return which sequences are held out, (N,) bool: whole clusters, in an order that the seed chooses.

    A cluster that would exceed the fraction is left to training, except that at least the smallest one is held out.
    Raises DataError where none would be left to train on.
    """
    names, sizes = np.unique(clusters, return_counts=True)
    if len(names) < 2:
        problem = f"all {len(clusters)} chains are similar, and none would be left to train on"
        raise DataError(Fault(f"data.eval_fraction {fraction:g}", problem, "give data.eval a folder"))
    wanted, chosen, taken = max(1, round(fraction * len(clusters))), list[int](), 0
    for at in np.random.RandomState([seed, HOLD_OUT_STREAM]).permutation(len(names)):
        if taken + sizes[at] <= wanted and len(chosen) < len(names) - 1:
            chosen.append(int(names[at]))
            taken += int(sizes[at])
    return np.isin(clusters, chosen or [names[np.argmin(sizes)]])
