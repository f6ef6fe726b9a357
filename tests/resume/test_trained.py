"""Whatever of a model is trained, at any ZeRO stage: a run saves it, resumes bit for bit, is evaluated and exported."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.resume.test_tasks import rows
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"
LORA = {"rank": 4, "alpha": 8.0}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": LORA},
    "DoRA": {"lora": LORA | {"dora": True}},
    "LoRA with frozen parts": {"lora": LORA, "freeze": ["*.layers.0"]},
}
"""What is trained -> the keys under `model`. In task vlm, `*.layers.0` is one of the tower's and one of the decoder's."""
FAST = {
    ("dpo", "LoRA with frozen parts", "zero2"),
}
"""The rest is run by `make test-all`. Stage 3: contract/test_sft and test_evaluate; stage 0: resume/test_tasks
[rm, adapters, no ZeRO]; kto: parity/test_tasks."""
GRID = [
    case if case in FAST else pytest.param(*case, marks=pytest.mark.slow)
    for case in product(("sft", "rm", "dpo", "kto", "vlm", "docqa"), TRAINED, ("zero0", "zero1", "zero2", "zero3"))
]


def written(folder: Path, task: str, trained: str, preset: str) -> str:
    values = tiny_recipe(task, folder)
    model = {**values["model"], **TRAINED[trained]}
    model["freeze"] = [*values["model"].get("freeze", []), *TRAINED[trained].get("freeze", [])]
    values |= {"model": model, "ds_config": preset, "optim": {"lr": 1e-2, "clip": 0.05}}
    values |= {"steps": 3, "save": {"every": 2}, "eval": {"every": 3}}
    write_recipe(folder, values)
    return str(folder / "recipe.yaml")


@pytest.mark.parametrize(("task", "trained", "preset"), GRID)
def test_a_run_resumes_is_evaluated_and_exported(
    task: str, trained: str, preset: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    recipe = written(tmp_path, task, trained, preset)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"))
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), crash_at=3)
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"))
    assert [(result["code"], len(result["samples"])) for result in again] == [(0, 1)] * 2, "the last step"
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole"), "bit for bit"
    found = one(CASES + "evaluate", folder=str(tmp_path / "broken"), data=str(tmp_path / "eval.jsonl"))[0]
    (told,) = [row for row in rows(tmp_path / "broken") if row["split"] == "eval" and row["step"] == 3]
    assert found["loss"] == pytest.approx(told["loss"], rel=1e-5)
    one(CASES + "export_only", run=str(tmp_path / "broken"), to=str(tmp_path / "out"), merge=trained != "full")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"]
