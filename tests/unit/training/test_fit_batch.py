"""`batch.on_oom: shrink`: smaller micro-batches of the same total, and the longest batch of a dataset."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dstrain.batch import PackingMode
from dstrain.config import BatchPlan, resolve_batch
from dstrain.config.schema import BatchConfig
from dstrain.data.dataset import SequenceLengths
from dstrain.data.loading.micro_batches import costs_of
from dstrain.errors import RecipeError
from dstrain.training import fit_batch
from dstrain.training.fit_batch import describe_reduction, find_longest_batch

LENGTHS = np.array([[5, 9], [2, 2], [7, 8], [6, 1], [9, 9]])
"""Tokens of both sequences of five samples."""


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        ({"total": 64, "micro": 8}, [(8, 4), (4, 8), (2, 16), (1, 32)]),
        ({"micro": 5, "accumulate": 1}, [(5, 1), (3, 2), (2, 3), (1, 5)]),
        ({"total": 6, "micro": 4}, [(4, 1), (2, 2), (1, 3)]),  # 3 samples a pass
        ({"total": 2, "micro": 2}, [(2, 1)]),  # 1 sample a pass
    ],
)
def test_half_a_micro_batch_keeps_the_total(batch: dict[str, int], sizes: list[tuple[int, int]]) -> None:
    plan: BatchPlan | None = resolve_batch(BatchConfig.model_validate(batch), 2)
    assert plan is not None
    total = plan.total
    tried = []
    while plan is not None:
        tried.append((plan.micro, plan.accumulate))
        assert plan.total == total
        written = plan.to_config(BatchConfig.model_validate(batch))
        assert resolve_batch(written, 2) == plan, "the recipe's form gives the same plan"
        plan = plan.half(2)
    assert tried == sizes


def test_the_tokens_of_a_pass_are_halved() -> None:
    plan = resolve_batch(BatchConfig(total=64, tokens_per_micro=8192), 2)
    half = plan.half(2)
    assert half is not None
    assert (half.tokens, half.total, half.accumulate, half.micro) == (4096, 64, None, 64)
    assert describe_reduction(plan, half) == "batch.tokens_per_micro 8192 -> 4096"
    assert half.to_config(BatchConfig(total=64, tokens_per_micro=8192)) == BatchConfig(total=64, tokens_per_micro=4096)
    assert replace(half, tokens=1).half(2) is None


def test_a_preset_that_fixes_the_micro_batch_is_refused_with_shrink() -> None:
    with pytest.raises(RecipeError, match=r"batch\.on_oom: is shrink, but the DeepSpeed JSON fixes the micro-batch"):
        resolve_batch(BatchConfig(total=8, on_oom="shrink"), 1, preset_micro=4)


@pytest.mark.parametrize(
    ("batch", "is_packed", "expected"),
    [
        (BatchConfig(total=4, micro=2), False, [0, 4]),
        (BatchConfig(total=4, micro=2), True, [4, 2]),
        (BatchConfig(total=16, micro=16), False, [0, 4, 2, 3, 1]),
        (BatchConfig(total=4, tokens_per_micro=40), False, [0, 4]),  # rows of 9 tokens, two for each sample
        (BatchConfig(total=4, tokens_per_micro=35), True, [4, 2]),
        (BatchConfig(total=4, tokens_per_micro=3), True, [4]),  # above the limit: a micro-batch of its own
    ],
)
def test_the_longest_batch_has_the_longest_samples_within_the_limits(
    batch: BatchConfig, is_packed: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_batch, "IDS_PER_BLOCK", 2)
    packing = PackingMode(is_packed=is_packed)
    costs = costs_of(lambda ids: SequenceLengths(LENGTHS[ids], np.zeros(len(ids), dtype=int)), packing)
    assert find_longest_batch(costs, len(LENGTHS), resolve_batch(batch, 1), 1) == expected


def test_without_lengths_the_first_samples_are_tried() -> None:
    assert find_longest_batch(None, 5, resolve_batch(BatchConfig(total=8, micro=2), 2), 2) == [0, 1]
