"""Datasets of a token store: training and held-out rows, rows aligned with another store."""

from __future__ import annotations

import numpy as np

from dstrain.data.cache.token_store import AlignedStore, TokenizedDataset, TokenStore
from dstrain.data.sources.base import ConcatSource
from dstrain.errors import DataError, Fault

NO_TRAIN_DATA = Fault("data.train", "is not set", "write `data: {train: pairs.jsonl}`")


def align_store(store: TokenStore, other: TokenStore) -> tuple[AlignedStore, np.ndarray]:
    """Return the rows of `other` with the records of `store`'s rows, and the records that `other` lacks, (K,).

    Both are built from the same sources with one example for a record. The row of a missing record is 0.
    """
    wanted, known = store.record_indices, other.record_indices
    order = np.argsort(known, kind="stable")
    found = np.searchsorted(known, wanted, sorter=order).clip(max=max(len(known) - 1, 0))
    rows = order[found] if len(known) else np.zeros(len(wanted), dtype=np.int64)
    is_missing = known[rows] != wanted if len(known) else np.ones(len(wanted), dtype=bool)
    return AlignedStore(other, np.where(is_missing, 0, rows)), np.asarray(wanted[is_missing])


def get_source_sizes(store: TokenStore, source: ConcatSource) -> tuple[int, ...]:
    """Return the records of each source, from the store's report; a source is opened only where it lacks them."""
    return tuple(store.report.sizes) or source.sizes


def split_examples(
    store: TokenStore, source_sizes: tuple[int, ...], weights: tuple[float, ...], eval_fraction: float, seed: int
) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """Return (training, held-out) examples; the seed chooses `eval_fraction` of each source."""
    sizes = store.count_per_source(source_sizes)
    starts = np.cumsum((0, *sizes))
    train, test = [], []
    for source, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        order = np.random.RandomState([seed, 3, source]).permutation(size) + start
        count = max(1, round(eval_fraction * size)) if eval_fraction else 0
        test.append(np.sort(order[:count]))
        train.append(np.sort(order[count:]))
        if eval_fraction and 0 < size <= count:
            problem = f"holds out all {size} records of source {source + 1} of data.train, and none is left to train on"
            raise DataError(
                Fault(f"data.eval_fraction {eval_fraction:g}", problem, "lower it, or give data.eval a file")
            )
    kept = TokenizedDataset(store, np.concatenate(train), tuple(map(len, train)), weights)
    if not eval_fraction:
        return kept, None
    return kept, TokenizedDataset(store, np.concatenate(test), tuple(map(len, test)), (1.0,) * len(test))
