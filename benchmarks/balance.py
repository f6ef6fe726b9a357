"""Measure how evenly a step's tokens are divided over passes and ranks, for the splits of packed and padded batches.

    python -m benchmarks.balance --data ../shared/data/hh/helpful-train.jsonl [--world-size 8] [--micro 4] [--tokens 4096]

Nothing is trained: the figures follow from the lengths of the samples. All splits have the same samples in every step.
A cost is a number of tokens that a pass computes, padding included, a shared prompt once in a packed batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import SHAPES, run
from benchmarks.padding import write_uneven
from dstrain.batch import PackingMode
from dstrain.config.schema import RunConfig
from dstrain.data.loading.micro_batches import (
    MicroBatchLimits,
    SampleCosts,
    costs_of,
    sort_longest_first,
    split_by_tokens,
    split_evenly,
)
from dstrain.tasks import make_task

Split = Callable[[SampleCosts], list[np.ndarray]]


def splits(total: int, world_size: int, micro: int, tokens: int) -> dict[str, tuple[bool, Split]]:
    """Return name -> (is packed, split of a step into the micro-batches of all ranks)."""
    count = -(-total // (micro * world_size)) * world_size
    limits = MicroBatchLimits(tokens=tokens)
    return {
        "padded, by length": (False, lambda costs: split_evenly(total, count, costs)),
        "padded, by tokens": (False, lambda costs: split_by_tokens(costs, limits, world_size)),
        "packed, by length": (True, lambda costs: np.array_split(sort_longest_first(costs.tokens), count)),
        "packed, balanced": (True, lambda costs: split_evenly(total, count, costs)),
        "packed, by tokens": (True, lambda costs: split_by_tokens(costs, limits, world_size)),
    }


def measure(*, task: str = "rm", data: str = "", length: int = 1024, total: int = 64, world_size: int = 8,
            micro: int = 4, tokens: int = 4096) -> dict[str, Any]:  # fmt: skip
    """Check that each split has every sample once, and compare its costs over an epoch."""
    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    made: Any = make_task(RunConfig.model_validate({
        "task": task,
        "model": {"config": {"model_type": "llama", **SHAPES["3m"]}, "tokenizer": {"train": "bpe", "vocab_size": 2048}},
        "data": {"train": data or str(write_uneven(folder / "train.jsonl", 4 * total)), "max_length": length},
    }))  # fmt: skip
    lengths = made.examples("train").sequence_lengths
    order = np.random.RandomState(0).permutation(len(made.examples("train")))
    steps = [order[start : start + total] for start in range(0, len(order) - total + 1, total)]
    rows = []
    for name, (is_packed, split) in splits(total, world_size, micro, tokens).items():
        found = costs_of(lengths, PackingMode(is_packed, shares_prefixes=is_packed))
        passes = [_pass_costs(found(ids), split, world_size) for ids in steps]
        rows.append({
            "split": name,
            "passes": np.mean([len(one) for one in passes]),
            "largest pass over mean": np.mean([one.max() / one.mean() for one in passes]),
            "slowest rank over mean, waiting at each pass": np.mean([one.max(1).sum() / one.mean(1).sum() for one in passes]),
            "at each step": np.mean([one.sum(0).max() / one.sum(0).mean() for one in passes]),
            "tokens of a step": np.mean([one.sum() for one in passes]),
        })  # fmt: skip
    settings = {
        "task": task,
        "length": length,
        "total": total,
        "world_size": world_size,
        "micro": micro,
        "tokens": tokens,
    }
    return {"settings": settings, "checked": f"each of {len(steps)} steps has every sample once", "rows": rows}


def _pass_costs(costs: SampleCosts, split: Split, world_size: int) -> np.ndarray:
    """Return (passes, ranks) costs of a step's micro-batches."""
    chunks = split(costs)
    assert sorted(int(one) for chunk in chunks for one in chunk) == list(range(len(costs.tokens)))
    return np.array([costs.of(chunk) for chunk in chunks], dtype=float).reshape(-1, world_size)


if __name__ == "__main__":
    run(measure, __doc__ or "")
