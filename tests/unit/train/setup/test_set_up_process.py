"""What a run is before any process group starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.train import TrainRequest, resolve_recipe
from dstrain.launch.topology import Worker
from dstrain.tasks import find_task
from dstrain.train.resume import ResumeOptions
from dstrain.train.setup.plan import RunPlan, make_plan


def planned(folder: Path, **changes: Any) -> RunPlan:
    recipe = find_task("dpo").tiny(folder)
    recipe["model"] |= changes.pop("model", {})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
    wish = resolve_recipe(TrainRequest(recipe=str(folder / "recipe.yaml")))
    return make_plan(wish, folder / "run", ResumeOptions(), Worker(0, 0, 1, "tests", 1))


@pytest.mark.parametrize(
    ("precision", "asked", "loaded"),
    [
        ("bf16", None, "bfloat16"),
        ("fp32", None, None),
        ("bf16", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
    ],
)
def test_weights_are_loaded_in_the_runs_precision_unless_the_recipe_says_otherwise(
    precision: str, asked: str | None, loaded: str | None, tmp_path: Path
) -> None:
    plan = planned(tmp_path, precision=precision, model={"dtype": asked})
    assert plan.task.recipe.model.dtype == loaded
    assert plan.task.loss_inputs.reference.config.dtype == loaded
    assert plan.config.model.dtype == asked, "the recipe that is written down stays as it was given"
