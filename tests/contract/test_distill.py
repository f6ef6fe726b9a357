"""Distillation from a recipe: runs, what they read from the cache, and teachers that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, read_jsonl, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"
OUTPUTS = "tests.contract.distill_cases:outputs"


def written(folder: Path, options: dict[str, Any] | None = None, **values: Any) -> str:
    """Write a recipe with a teacher that is sure of its tokens; return its file."""
    recipe = tiny_recipe("distill", folder)
    weights = folder / "teacher/model.safetensors"
    changed = load_file(weights) | {"lm_head.weight": 20 * load_file(weights)["lm_head.weight"]}
    save_file(changed, weights, metadata={"format": "pt"})
    options = recipe["options"] | {"precompute_ref_log_probs": True} | (options or {})
    write_recipe(folder, recipe | {"options": options} | values)
    return str(folder / "recipe.yaml")


@pytest.mark.slow
def test_a_student_learns_its_teacher_on_one_process_as_on_two(tmp_path: Path, one: Workers, two: Workers) -> None:
    values = {"steps": 16, "eval": {"every": 8}, "optim": {"lr": 1e-2}, "ds_config": "zero3"}
    recipe = written(tmp_path, {"ce_weight": 0.0, "temperature": 1.5}, **values)
    rows = []
    for name, workers in (("one", one), ("two", two)):
        workers(RUN, recipe=recipe, run_dir=str(tmp_path / name))
        rows.append([row for row in read_jsonl(tmp_path / name / "metrics.jsonl") if row["split"] == "eval"])
    kl = [row["kl"] for row in rows[0]]
    assert kl[-1] < 0.9 * kl[0], kl
    assert rows[0][-1]["loss"] == pytest.approx(1.5**2 * kl[-1], rel=1e-5)
    for name in ("loss", "kl", "token_accuracy"):
        assert [row[name] for row in rows[1]] == pytest.approx([row[name] for row in rows[0]], rel=1e-3), name


def test_training_builds_no_teacher_after_prepare(tmp_path: Path, two: Workers) -> None:
    recipe = written(tmp_path, steps=1, seed=41)
    said = invoke("prepare", recipe)
    assert said.exit_code == 0, said.output
    assert "reference: 64 samples to compute" in said.stderr
    assert two(CASES + "train_counting", recipe=recipe, run_dir=str(tmp_path / "run")) == [0, 0]


def test_hosts_with_caches_of_their_own_read_the_same_outputs(tmp_path: Path, one: Workers, two: Workers) -> None:
    recipe = written(tmp_path)
    (wanted,) = one(OUTPUTS, recipe=recipe, cache=str(tmp_path / "whole"))
    for turn in range(2):  # computed, then read on rank 0 and sent to the other
        for found in two(OUTPUTS, recipe=recipe, cache=str(tmp_path / "parts"), own=True):
            assert len(found) == len(wanted) == 80, turn
            assert all(np.array_equal(*pair) for pair in zip(found, wanted, strict=True))
    assert not (tmp_path / "parts/rank 1/references").exists(), "rank 0 writes"


def test_a_teacher_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    recipe = written(tmp_path)

    def refuse(wanted: str, command: str, teacher: str) -> None:
        run_dir = ("--run-dir", tmp_path / "run") if command == "train" else ()
        said = invoke(command, recipe, *run_dir, "--set", f"options.teacher={teacher}")
        assert said.exit_code == 2, said.output
        assert wanted in said.output
        assert not (tmp_path / "run").exists()

    refuse("options.teacher: is missing; give the folder or hub id of the teacher", "train", "null")
    refuse("options.teacher: '/nowhere' is not a folder", "train", "/nowhere")
    shutil.copytree(tmp_path / "teacher", tmp_path / "other")
    text = (tmp_path / "other/tokenizer.json").read_text()
    assert text.count('"!"') == 1
    (tmp_path / "other/tokenizer.json").write_text(text.replace('"!"', '"unlike"'))
    refuse("has another vocabulary than the model that is trained (its token '!' has the id None, the model's",
           "prepare", f"{tmp_path / 'other'}")  # fmt: skip
