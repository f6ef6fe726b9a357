"""The smaller micro-batch in the run folder: when it takes the place of the recipe's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.config import BatchPlan, Recipe, RunConfig, read_recipe, resolve_batch
from dstrain.config.schema import BatchConfig
from dstrain.errors import RecipeError, RunError
from dstrain.train.memory.reduced_batch import FILE_NAME, MicroBatchSize, apply_reduced_batch, read_reduced_batch


def recipe(**batch: Any) -> Recipe:
    values = {
        "task": "rm",
        "model": {"path": "x"},
        "data": {"train": "y"},
        "steps": 4,
        "batch": {"on_oom": "shrink", **batch},
    }
    return Recipe(RunConfig.model_validate(values), "test", Path())


def shrink(run_dir: Path, asked: Recipe, world_size: int = 2, samples: tuple[int, ...] = ()) -> str:
    """Store half the micro-batch of a run; return what changed."""
    micro = MicroBatchSize(asked.config, resolve_batch(asked.config.batch, world_size), world_size, run_dir)
    reduced = micro.find_reduced(samples)
    assert reduced is not None
    return micro.store(reduced, 3)


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
    total, found = plan.total, []
    while plan is not None:
        found.append((plan.micro, plan.accumulate))
        assert plan.total == total
        written = plan.to_config(BatchConfig.model_validate(batch))
        assert resolve_batch(written, 2) == plan, "what is stored gives the same plan"
        plan = plan.half(2)
    assert found == sizes


def test_the_tokens_of_a_pass_are_halved() -> None:
    plan = resolve_batch(BatchConfig(total=64, tokens_per_micro=8192), 2)
    half = plan.half(2)
    assert half is not None
    assert (half.tokens, half.total, half.accumulate, half.micro) == (4096, 64, None, 64)
    assert half.to_config(BatchConfig(total=64, tokens_per_micro=8192)) == BatchConfig(total=64, tokens_per_micro=4096)
    assert replace(half, tokens=1).half(2) is None


def test_a_preset_that_fixes_the_micro_batch_is_refused_with_shrink() -> None:
    with pytest.raises(RecipeError, match=r"batch\.on_oom: is shrink, but the DeepSpeed JSON fixes the micro-batch"):
        resolve_batch(BatchConfig(total=8, on_oom="shrink"), 1, preset_micro=4)


def test_the_next_start_takes_the_smaller_one_and_keeps_the_recipes_reaction(tmp_path: Path) -> None:
    asked = recipe(micro=8, accumulate=2)
    assert shrink(tmp_path, asked) == "batch.micro 8 -> 4"
    found = apply_reduced_batch(asked, tmp_path, 2, "auto").config.batch
    assert (found.total, found.micro, found.accumulate, found.on_oom) == (32, 4, None, "shrink")
    stops = recipe(micro=8, accumulate=2, on_oom="stop")
    assert apply_reduced_batch(stops, tmp_path, 2, "auto").config.batch.on_oom == "stop"
    assert read_recipe(tmp_path / "recipe.yaml").config.batch.micro == 4


def test_a_second_failure_remembers_the_recipe_of_the_first(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    assert shrink(tmp_path, apply_reduced_batch(asked, tmp_path, 2, "auto")) == "batch.micro 4 -> 2"
    assert apply_reduced_batch(asked, tmp_path, 2, "auto").config.batch.micro == 2


def test_a_size_between_the_recipe_and_the_newest_one_is_known(tmp_path: Path) -> None:
    """A launch of RUN/recipe.yaml asks for the size that was the newest when it began."""
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    again = replace(read_recipe(tmp_path / "recipe.yaml"), name="test")
    shrink(tmp_path, again)
    assert apply_reduced_batch(again, tmp_path, 2, "auto").config.batch.micro == 2
    assert apply_reduced_batch(asked, tmp_path, 2, "auto").config.batch.micro == 2


def test_ranks_that_write_one_after_the_other_write_the_same(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    for _ in range(2):
        config = apply_reduced_batch(asked, tmp_path, 2, "auto")
        contents = set()
        for _ in range(3):
            shrink(tmp_path, config)
            contents.add((tmp_path / FILE_NAME).read_text())
        assert len(contents) == 1


def test_another_batch_preset_or_world_and_a_new_run_begin_with_the_recipe(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    other = asked.config.model_copy(update={"ds_config": "zero3"})
    for changed, world_size, resume in (
        (recipe(total=64, micro=16), 2, "auto"),
        (Recipe(other, "test", Path()), 2, "auto"),
        (asked, 4, "auto"),
        (asked, 2, "never"),
    ):
        assert apply_reduced_batch(changed, tmp_path, world_size, resume) == changed


def test_a_pass_of_one_sample_and_stop_have_no_smaller_one(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    micro = MicroBatchSize(asked.config, resolve_batch(asked.config.batch, 2), 2, tmp_path)
    assert micro.find_reduced([8, 1]) is None
    stops = recipe(total=64, micro=8, on_oom="stop")
    assert MicroBatchSize(stops.config, micro.plan, 2, tmp_path).find_reduced() is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(RunError, match=r"micro_batch\.json: is not readable"):
        read_reduced_batch(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    shrink(tmp_path, recipe(total=64, micro=8))
    values = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps(values | {"recipe": 8}))
    with pytest.raises(RunError, match=r"micro_batch\.json: is not readable"):
        read_reduced_batch(tmp_path)
    shrink(tmp_path, recipe(total=64, micro=8))  # it is replaced when memory runs out again
    assert read_reduced_batch(tmp_path) is not None
