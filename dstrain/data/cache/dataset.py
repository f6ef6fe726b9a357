"""The tokenized dataset of one split: rows of a token store, grouped by source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dstrain.data.cache.token_store import TokenStore
from dstrain.data.dataset import SequenceLengths
from dstrain.data.sources.base import ConcatSource
from dstrain.errors import DataError, Fault

NO_TRAIN_DATA = Fault("data.train", "is not set", "write `data: {train: pairs.jsonl}`")


@dataclass(frozen=True)
class AlignedStore:
    """The records of a dataset's store, encoded for another model."""

    store: TokenStore
    rows: np.ndarray
    """(M,) rows of `store` that hold the records of the M rows of the dataset's store."""


@dataclass(frozen=True)
class TokenizedDataset:
    """Rows of a token store, as a `Dataset`. Thread-safe."""

    store: TokenStore
    rows: np.ndarray
    """(N,) rows of the store, those of each source together."""
    sizes: tuple[int, ...]
    """Examples of each source."""
    weights: tuple[float, ...]
    """Times that an epoch uses each source."""
    output_columns: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Name -> a number for each row of the store: precomputed outputs of frozen models."""
    aligned_stores: Mapping[str, AlignedStore] = field(default_factory=dict, repr=False)
    """Name of a frozen model with a tokenizer of its own -> the same records as it reads them."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts for the report."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = int(self.rows[index])
        return self.store[row] | {name: float(column[row]) for name, column in self.output_columns.items()}

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the tokens of the longest sequence of each of these examples, (N,) -> (N,)."""
        return self.store.max_lengths(self.rows[ids])

    def sequence_lengths(self, ids: np.ndarray) -> SequenceLengths:
        """Return the tokens of all sequences of each of these examples."""
        return self.store.sequence_lengths(self.rows[ids])

    @property
    def image_digest(self) -> str | None:
        return None if self.store.image_index is None else self.store.image_index.digest

    def summarize(self) -> dict[str, Any]:
        return {"samples": len(self), **self.store.summarize(self.rows), **self.report}

    @property
    def report(self) -> dict[str, Any]:
        """Counts of records read, used and skipped, for events.jsonl."""
        report = asdict(self.store.report)
        bad, notes, _ = report.pop("bad"), report.pop("notes"), report.pop("sizes")
        report |= {"notes": notes} if notes else {}
        skipped = [f"{where}: {reason}" for where, reason in bad[:100]]
        return {**report, **self.counts, "skipped": len(bad), "skipped_records": skipped}

    def column(self, name: str) -> np.ndarray:
        """Return a number for each example, (N,)."""
        values = self.output_columns.get(name)
        return (self.store.scalar_column(name) if values is None else values)[self.rows]

    def select(self, keep: np.ndarray) -> TokenizedDataset:
        """Return the examples where `keep`, (N,) bool, is true."""
        ends = np.cumsum(self.sizes)
        sizes = [int(keep[end - size : end].sum()) for size, end in zip(self.sizes, ends, strict=True)]
        return replace(self, rows=self.rows[keep], sizes=tuple(sizes))


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
