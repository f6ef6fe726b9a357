"""What follows from a recipe: batches that always cover the total, and keys that may not change on resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.config import BatchPlan, check_learning_changes, dump_recipe, read_recipe, resolve_batch, resolve_steps
from dstrain.config.schema import BatchConfig, OptimConfig, RunConfig
from dstrain.data.loading.micro_batches import split_evenly
from dstrain.errors import RecipeError

COUNT = st.integers(1, 300)


@given(COUNT, COUNT, st.integers(1, 64))
def test_any_two_give_the_third(total: int, other: int, processes: int) -> None:
    by_micro = resolve_batch(BatchConfig(total=total, micro=other), processes)
    assert by_micro.total == total
    assert by_micro.accumulate == math.ceil(total / (other * processes))
    by_accumulate = resolve_batch(BatchConfig(total=total, accumulate=other), processes)
    assert by_accumulate.micro * by_accumulate.accumulate * processes >= total
    product = resolve_batch(BatchConfig(micro=total, accumulate=other), processes)
    assert product.total == total * other * processes


@given(COUNT, COUNT, st.integers(1, 64))
def test_the_largest_forward_pass_is_what_the_data_plan_deals(total: int, micro: int, processes: int) -> None:
    batch = resolve_batch(BatchConfig(total=total, micro=micro), processes)
    assert batch.accumulate is not None
    dealt = split_evenly(total, batch.accumulate * processes)
    assert batch.largest_micro(processes) == max(len(chunk) for chunk in dealt) <= micro


@pytest.mark.parametrize(
    ("total", "micro", "processes", "wanted"),
    [
        (16, 8, 8, "16 samples (8 processes x 1 forward pass x 2 samples)"),
        (6, 2, 2, "6 samples (2 processes x 2 forward passes x up to 2 samples)"),
        (1, 1, 1, "1 sample (1 process x 1 forward pass x 1 sample)"),
        (4, 8, 8, "4 samples (8 processes x 1 forward pass x up to 1 sample)"),
    ],
)
def test_a_batch_is_shown_as_it_is_cut_up(total: int, micro: int, processes: int, wanted: str) -> None:
    batch = BatchPlan(total, micro, -(-total // (micro * processes)))
    assert batch.describe(processes) == wanted


def test_a_batch_of_tokens_is_shown_with_its_limits() -> None:
    batch = resolve_batch(BatchConfig(total=64, tokens_per_micro=8192), 2)
    assert (batch.total, batch.accumulate, batch.tokens) == (64, None, 8192)
    assert batch.describe(2) == "64 samples (2 processes, forward passes of up to 8192 tokens each)"
    few = resolve_batch(BatchConfig(total=64, micro=4, tokens_per_micro=8192), 1)
    assert few.describe(1) == "64 samples (1 process, forward passes of up to 8192 tokens, and up to 4 samples, each)"


def test_the_number_of_passes_is_not_given_with_a_limit_of_tokens() -> None:
    with pytest.raises(RecipeError, match=r"gradient_accumulation_steps is 4 in the DeepSpeed JSON; remove it there"):
        resolve_batch(BatchConfig(total=64, tokens_per_micro=8192), 2, preset_accumulate=4)


def test_a_json_stands_in_where_the_recipe_is_silent() -> None:
    assert resolve_batch(BatchConfig(total=32), 2, preset_micro=4).accumulate == 4
    with pytest.raises(RecipeError, match="is 2 in the recipe and 4 in the DeepSpeed JSON"):
        resolve_batch(BatchConfig(total=32, micro=2), 2, preset_micro=4)


def test_epochs_end_with_a_smaller_step() -> None:
    assert resolve_steps(RunConfig(epochs=2), 25, 8) == (7, 50)
    assert resolve_steps(RunConfig(), 25, 8) == (4, 25)
    assert resolve_steps(RunConfig(steps=3), 25, 8) == (3, 24)
    with pytest.raises(RecipeError, match=r"optim\.warmup: is 9 of only 7 steps"):
        resolve_steps(RunConfig(epochs=2, optim=OptimConfig(warmup=9)), 25, 8)


def test_only_learning_keys_are_held_fast() -> None:
    before = RunConfig(task="rm", seed=1)
    free = {"launch": {"env": []}, "ds_config": "zero3", "log": {"every": 3}, "eval": {"every": 9}, "save": {"every": 7},
            "batch": {"micro": 2}, "data": {"workers": 0}}  # fmt: skip
    assert not check_learning_changes(before, RunConfig.model_validate({"task": "rm", "seed": 1, **free}))
    changed = RunConfig.model_validate({"task": "rm", "seed": 2, "optim": {"lr": 1}, "batch": {"total": 9}})
    assert [fault.where for fault in check_learning_changes(before, changed)] == ["batch.total", "optim.lr", "seed"]
    assert [fault.where for fault in check_learning_changes(before, changed, ["optim", "seed"])] == ["batch.total"]


def test_what_is_shown_reads_back_the_same(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"task": "rm", "data": {"train": ["a", {"path": "b", "weight": 0.5}]}, "optim": {"lr": "1e-5"}}
    )
    (tmp_path / "shown.yaml").write_text(dump_recipe(config))
    assert read_recipe(tmp_path / "shown.yaml").config == config


@given(COUNT, COUNT, st.integers(1, 16), st.integers(1, 8))
def test_groups_of_processes_share_a_step_as_single_ones_do(total: int, micro: int, size: int, sequence: int) -> None:
    alone = resolve_batch(BatchConfig(total=total, micro=micro), size)
    shared = resolve_batch(BatchConfig(total=total, micro=micro), size * sequence, sequence=sequence)
    assert (shared.total, shared.micro, shared.accumulate) == (alone.total, alone.micro, alone.accumulate)
    assert shared.largest_micro(size * sequence) == alone.largest_micro(size)
    half = shared.half(size * sequence)
    assert half is None or half.sequence == sequence


def test_the_processes_of_a_group_divide_all_processes() -> None:
    with pytest.raises(
        RecipeError, match=r"parallel\.sequence: is 4, which does not divide the 6 processes; write 1 or 2 or 3"
    ):
        resolve_batch(BatchConfig(micro=1), 6, sequence=4)
    plan = resolve_batch(BatchConfig(total=8, micro=1), 8, sequence=4)
    assert plan.describe(8) == "8 samples (2 groups of 4 processes x 4 forward passes x 1 sample)"
