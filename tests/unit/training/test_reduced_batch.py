"""The smaller micro-batch in the run folder: when it takes the place of the recipe's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.config import BatchPlan, RunConfig, read_recipe, resolve_batch
from dstrain.config.schema import BatchConfig
from dstrain.errors import RecipeError, RunError
from dstrain.planner.workload import Cluster
from dstrain.training.start import (
    REDUCED_BATCH_FILE,
    ResumeOptions,
    describe_reduction,
    guess_start,
    read_reduced_batch,
    with_reduced_batch,
    write_reduced_batch,
)


def recipe(**batch: Any) -> RunConfig:
    values = {
        "task": "rm",
        "model": {"path": "x"},
        "data": {"train": "y"},
        "steps": 4,
        "batch": {"on_oom": "shrink", **batch},
    }
    return RunConfig.model_validate(values)


def shrink(run_dir: Path, config: RunConfig, world_size: int = 2) -> str:
    """Write half the micro-batch of a run; return what changed."""
    batch = resolve_batch(config.batch, world_size)
    reduced = batch.half(world_size)
    assert reduced is not None
    write_reduced_batch(run_dir, config, reduced, world_size, 3)
    return describe_reduction(batch, reduced)


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
    found = with_reduced_batch(asked, tmp_path, 2).batch
    assert (found.total, found.micro, found.accumulate, found.on_oom) == (32, 4, None, "shrink")
    stops = recipe(micro=8, accumulate=2, on_oom="stop")
    assert with_reduced_batch(stops, tmp_path, 2).batch.on_oom == "stop"
    assert read_recipe(tmp_path / "recipe.yaml").config.batch.micro == 4


def test_a_second_failure_remembers_the_recipe_of_the_first(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    assert shrink(tmp_path, with_reduced_batch(asked, tmp_path, 2)) == "batch.micro 4 -> 2"
    assert with_reduced_batch(asked, tmp_path, 2).batch.micro == 2


def test_a_size_between_the_recipe_and_the_newest_one_is_known(tmp_path: Path) -> None:
    """A launch of RUN/recipe.yaml asks for the size that was the newest when it began."""
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    again = read_recipe(tmp_path / "recipe.yaml").config
    shrink(tmp_path, again)
    assert with_reduced_batch(again, tmp_path, 2).batch.micro == 2
    assert with_reduced_batch(asked, tmp_path, 2).batch.micro == 2


def test_ranks_that_write_one_after_the_other_write_the_same(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    for _ in range(2):
        config = with_reduced_batch(asked, tmp_path, 2)
        contents = set()
        for _ in range(3):
            shrink(tmp_path, config)
            contents.add((tmp_path / REDUCED_BATCH_FILE).read_text())
        assert len(contents) == 1


def test_another_batch_preset_or_world_begins_with_the_recipe(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    other = asked.model_copy(update={"ds_config": "zero3"})
    for changed, world_size in ((recipe(total=64, micro=16), 2), (other, 2), (asked, 4)):
        assert with_reduced_batch(changed, tmp_path, world_size) == changed


def test_a_new_run_begins_with_the_recipe(tmp_path: Path) -> None:
    asked = recipe(total=64, micro=8)
    shrink(tmp_path, asked)
    for resume, micro in (("never", 8), ("auto", 4)):
        start = guess_start(asked, tmp_path, ResumeOptions(resume), 2, Cluster(gpus_per_node=2, kind="cpu"))
        assert start.batch.micro == micro


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / REDUCED_BATCH_FILE).write_text("{")
    with pytest.raises(RunError, match=r"micro_batch\.json: is not readable"):
        read_reduced_batch(tmp_path)
    (tmp_path / REDUCED_BATCH_FILE).unlink()
    shrink(tmp_path, recipe(total=64, micro=8))
    values = json.loads((tmp_path / REDUCED_BATCH_FILE).read_text())
    (tmp_path / REDUCED_BATCH_FILE).write_text(json.dumps(values | {"recipe": 8}))
    with pytest.raises(RunError, match=r"micro_batch\.json: is not readable"):
        read_reduced_batch(tmp_path)
    shrink(tmp_path, recipe(total=64, micro=8))  # it is replaced when memory runs out again
    assert read_reduced_batch(tmp_path) is not None
