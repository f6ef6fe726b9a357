"""Examples of one split: a token store, or a part of it, and how it is made up of sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dstrain.data.cache.token_store import TokenStore
from dstrain.data.sources.open import ConcatSource
from dstrain.errors import DataError, Fault

NO_TRAIN_DATA = Fault("data.train", "is not set", "write `data: {train: pairs.jsonl}`")


@dataclass(frozen=True)
class TokenizedDataset:
    """What the loader indexes. Thread-safe."""

    store: TokenStore
    rows: np.ndarray
    """(N,) rows of the store, those of each source together."""
    sizes: tuple[int, ...]
    """Examples of each source."""
    weights: tuple[float, ...]
    """How often an epoch shows each source."""
    reference_columns: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Column -> a number for each row of the store, computed elsewhere: what a reference says of the example."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = int(self.rows[index])
        return self.store[row] | {name: float(column[row]) for name, column in self.reference_columns.items()}

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """(N,) tokens of the longest sequence of each of these examples, (N,)."""
        return self.store.max_lengths(self.rows[ids])

    @property
    def image_digest(self) -> str | None:
        return None if self.store.image_index is None else self.store.image_index.digest

    def summarize(self) -> dict[str, Any]:
        return {"samples": len(self), **self.store.summarize(self.rows), **self.report}

    @property
    def report(self) -> dict[str, Any]:
        """What came of reading the sources, for events.jsonl."""
        report = asdict(self.store.report)
        bad, _ = report.pop("bad"), report.pop("sizes")
        return {**report, "skipped": len(bad), "skipped_records": [f"{where}: {reason}" for where, reason in bad[:100]]}


def get_source_sizes(store: TokenStore, source: ConcatSource) -> tuple[int, ...]:
    """Records of each source, as the store noted them when it was built; else the sources are opened."""
    return tuple(store.report.sizes) or source.sizes


def split_examples(
    store: TokenStore, source_sizes: tuple[int, ...], weights: tuple[float, ...], eval_fraction: float, seed: int
) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """(training, held-out) examples; `held_out` is the share of each source that is held out, chosen by the seed."""
    sizes = store.count_per_source(source_sizes)
    starts = np.cumsum((0, *sizes))
    train, test = [], []
    for source, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        order = np.random.RandomState([seed, 3, source]).permutation(size) + start
        count = max(1, round(eval_fraction * size)) if eval_fraction else 0
        test.append(np.sort(order[:count]))
        train.append(np.sort(order[count:]))
        if eval_fraction and 0 < size <= count:
            problem = (
                f"holds out all {size} records of source {source + 1} of data.train, and none is left to learn from"
            )
            raise DataError(
                Fault(f"data.eval_fraction {eval_fraction:g}", problem, "lower it, or give data.eval a file")
            )
    kept = TokenizedDataset(store, np.concatenate(train), tuple(map(len, train)), weights)
    if not eval_fraction:
        return kept, None
    return kept, TokenizedDataset(store, np.concatenate(test), tuple(map(len, test)), (1.0,) * len(test))
