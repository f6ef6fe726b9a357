"""Splits by similarity: a near copy of a held-out chain is never trained on."""

from __future__ import annotations

import numpy as np
import pytest

from dstrain.data import structures
from dstrain.data.structures import choose_eval_chains, cluster_sequences, load_or_cluster
from dstrain.errors import DataError


def sequence(seed: int, length: int = 150) -> np.ndarray:
    return np.random.RandomState(seed).randint(20, size=length).astype(np.int32)


def mutated(original: np.ndarray, identity: float, seed: int = 0) -> np.ndarray:
    """Return the sequence with this share of residues kept, the others replaced by different ones."""
    random, copy = np.random.RandomState([seed, 9]), original.copy()
    changed = random.permutation(len(copy))[: round((1 - identity) * len(copy))]
    copy[changed] = (copy[changed] + random.randint(1, 20, size=len(changed))) % 20
    return copy


def test_unrelated_sequences_are_clusters_of_their_own() -> None:
    assert len({*cluster_sequences([sequence(seed) for seed in range(80)], 0.4)}) == 80


@pytest.mark.parametrize("identity", [1.0, 0.95, 0.8, 0.6])
def test_a_copy_with_mutations_is_in_the_cluster_of_its_original(identity: float) -> None:
    originals = [sequence(seed) for seed in range(10)]
    copies = [mutated(one, identity, seed) for seed, one in enumerate(originals)]
    found = cluster_sequences([*originals, *copies], 0.4)
    assert list(found[:10]) == list(found[10:]) == list(range(10))


def test_a_part_of_a_chain_is_similar_to_it() -> None:
    assert len({*cluster_sequences([sequence(1, 300), sequence(1, 300)[100:160]], 0.4)}) == 1


def test_a_higher_threshold_tells_more_sequences_apart() -> None:
    pair = [sequence(1), mutated(sequence(1), 0.7)]
    assert len({*cluster_sequences(pair, 0.5)}) == 1
    assert len({*cluster_sequences(pair, 0.95)}) == 2


def test_similarity_is_followed_from_chain_to_chain() -> None:
    chain = [sequence(1)]
    for step in range(6):
        chain.append(mutated(chain[-1], 0.85, step))
    assert len({*cluster_sequences(chain, 0.6)}) == 1


def test_copies_too_short_for_words_are_one_cluster() -> None:
    short = np.array([1, 2, 3], dtype=np.int32)
    assert list(cluster_sequences([short, short.copy(), np.array([1, 2], np.int32)], 0.4)) == [0, 0, 2]


def test_whole_clusters_are_held_out_and_the_seed_chooses_them() -> None:
    clusters = np.repeat(np.arange(40), 3)
    first, again, other = (choose_eval_chains(clusters, 0.25, seed) for seed in (0, 0, 1))
    assert first.sum() == 30
    assert (first == again).all()
    assert (first != other).any()
    assert not {*clusters[first]} & {*clusters[~first]}


def test_a_cluster_that_exceeds_the_fraction_is_trained_on() -> None:
    clusters = np.array([0] * 50 + [50, 51])
    assert list(np.flatnonzero(choose_eval_chains(clusters, 0.02, 0))) in ([50], [51])


def test_chains_that_are_all_similar_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"all 7 chains are similar"):
        choose_eval_chains(np.zeros(7, dtype=np.int64), 0.1, 0)


def test_clusters_are_cached_by_tokens_and_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [*np.random.RandomState(0).randint(0, 20, (6, 40))] * 2
    wanted = cluster_sequences(sequences, 0.4)
    assert list(load_or_cluster("a", sequences, 0.4)) == list(wanted)
    with monkeypatch.context() as patch:
        patch.setattr(structures, "cluster_sequences", lambda *_: pytest.fail("clustered again"))
        assert list(load_or_cluster("a", sequences, 0.4)) == list(wanted)
    assert len(load_or_cluster("b", sequences[:5], 0.4)) == 5
