"""Reward models of dpo from the command line: prepared once, named at resume, in no checkpoint and no export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.prepare import PrepareJob
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.errors import ResumeError
from dstrain.launch.topology import Worker
from dstrain.training.plan import make_plan
from dstrain.training.start import ResumeOptions
from tests.cells import SLOW
from tests.reward_models import export_reward_model
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke, read_events, read_jsonl, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"


def written(folder: Path, scoring: str = "cached", **values: Any) -> str:
    """Write a recipe with two reward models, named relative to it, and its data; return its path."""
    for name in ("helpful", "harmless"):
        if not (folder / name).exists():
            export_reward_model(folder, name)
    safety = {"harmless_rm": "./harmless", "helpful_rm": "./helpful", "scoring": scoring, "method": "safedpo"}
    recipe = tiny_recipe("dpo", folder) | {"options": {"safety": safety}, "steps": 2, "save": {"every": 2}} | values
    write_recipe(folder, recipe)
    return str(folder / "recipe.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("preset", [SLOW("zero2"), "zero3"])  # asked in one place for all stages
def test_training_holds_no_reward_model_after_prepare(preset: str, tmp_path: Path, two: Workers) -> None:
    recipe = written(tmp_path, ds_config=preset)
    assert PrepareJob(TrainRequest(recipe=recipe)).is_parallel
    result = invoke("prepare", recipe, "--set", "ds_config=zero2")
    assert result.exit_code == 0, result.stderr
    for name in ("helpful", "harmless"):
        assert f"{name} reward model: its scores of all samples are cached" in result.stdout
    assert "to compute" not in invoke("prepare", recipe, "--set", "ds_config=zero2").stderr
    assert two(CASES + "train_counting", recipe=recipe, run_dir=str(tmp_path / "run")) == [0, 0]
    (model,) = read_events(tmp_path / "run", "model")
    assert model["reward_models"] == {"helpful": "cached", "harmless": "cached"}
    started, data = (read_events(tmp_path / "run", name) for name in ("started", "data"))
    assert started[0]["train_samples"] == 64 - data[0]["pairs_dropped"] < 64
    row = read_jsonl(tmp_path / "run/metrics.jsonl")[-1]
    assert "harmless_margin" in row


def test_a_resume_with_another_reward_model_is_refused_by_its_key(tmp_path: Path, two: Workers) -> None:
    recipe, run = written(tmp_path), tmp_path / "run"
    two("tests.resume.cases:run", recipe=recipe, run_dir=str(run))

    def plan(*allowed: str) -> None:
        make_plan(
            resolve_recipe(TrainRequest(recipe=recipe, overrides=["steps=4"])), run,
            ResumeOptions("auto", ("steps", *allowed)), Worker(0, 0, 1, "tests", 1),
        )  # fmt: skip

    plan()
    config = tmp_path / "harmless/tokenizer_config.json"
    before = config.read_text()
    config.write_text(before.replace("</s>", "<pad>"))
    with pytest.raises(ResumeError, match=r"^options\.safety\.harmless_rm: its content is not what"):
        plan()
    config.write_text(before)
    weights = tmp_path / "harmless/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x40")
    with pytest.raises(ResumeError, match=r"harmless reward model .* --allow-change options\.safety\.harmless_rm$"):
        plan()
    plan("options.safety.harmless_rm")


@pytest.mark.slow
def test_a_run_with_reward_models_is_evaluated_as_it_was_trained(tmp_path: Path, two: Workers) -> None:
    recipe, run = written(tmp_path, "online", eval={"every": 2}), tmp_path / "run"
    two("tests.resume.cases:run", recipe=recipe, run_dir=str(run))
    last = [row for row in read_jsonl(run / "metrics.jsonl") if row["split"] == "eval"][-1]
    for scoring in ("online", "cached"):
        words = ["--data", tmp_path / "eval.jsonl", "--json", "--set", f"options.safety.scoring={scoring}"]
        found = invoke("evaluate", run, *words)
        assert found.exit_code == 0, found.stderr
        row = json.loads(found.stdout)
        for name in ("loss", "harmless_margin", "accuracy"):
            assert row[name] == pytest.approx(last[name], abs=1e-5), name
