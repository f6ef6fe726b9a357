"""The recipes by card train: as they are, but with a tiny model and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cells import mark_slow
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, read_jsonl
from tests.workers import Workers

RECIPES = ("lowmem-8gb", "lowmem-12gb", "lowmem-16gb", "lowmem-24gb")
CASES = [*((name, "sft") for name in RECIPES), *(("lowmem-8gb", task) for task in ("rm", "dpo", "kto", "vlm"))]


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_needs_no_model_and_no_data(name: str, tmp_path: Path) -> None:
    result = invoke("train", name, "--dry-run", "--run-dir", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "8bit" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task"),
    # Recipes that differ in the rank and the micro-batch; of the tasks one with pairs and one with images.
    mark_slow(CASES, [case for case in CASES if case not in (("lowmem-8gb", "dpo"), ("lowmem-8gb", "vlm"))]),
)
def test_a_shrunken_recipe_trains(name: str, task: str, tmp_path: Path, one: Workers) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")
    values: dict[str, Any] = tiny_recipe(task, tmp_path)
    model = {"path": None, "config": None, "tokenizer": None, "processor": None, **values["model"]}
    data = {key: values["data"][key] for key in ("train", "eval")}
    changes = {f"model.{key}": value for key, value in model.items()}
    changes |= {f"data.{key}": value for key, value in data.items()}
    changes |= {"task": task, "options": values.get("options", {}), "data.max_length": values["data"]["max_length"]}
    changes |= {"batch.total": 4, "epochs": None, "steps": 3, "log.every": 1, "log.tensorboard": False}
    sets = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    (told,) = one(RUN, recipe=name, run_dir=str(tmp_path / "run"), sets=sets)
    assert told["code"] == 0
    rows = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if row["split"] == "train"]
    assert len(rows) == 3
    assert all(row["grad_norm"] > 0 for row in rows)
