"""After `dstrain prepare` training starts at once, and nothing else is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.find import Wish
from dstrain.commands.prepare import Prepare
from dstrain.commands.spread import Reply
from dstrain.tasks import find_task
from tests.contract.test_cli import call
from tests.contract.test_evaluate import start
from tests.workers import Workers

CASES = "tests.contract.export_cases:"


def written(folder: Path, task: str = "dpo", **values: Any) -> str:
    recipe = find_task(task).tiny(folder) | values
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


REMEMBERED = {"options": {"precompute_ref_log_probs": True}, "steps": 1, "seed": 77}


def test_training_asks_no_reference_after_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Workers
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = written(tmp_path, **REMEMBERED)
    result = call("prepare", recipe)
    assert result.exit_code == 0
    assert "train: 64 samples" in result.stdout
    assert "its answers to all samples are kept" in result.stdout
    assert "reference: 64 samples to ask for" in result.stderr
    assert not list((tmp_path / "here").iterdir())
    assert two(CASES + "train_counting", recipe=recipe, run_dir=str(tmp_path / "run")) == [0, 0]
    assert "to ask for" not in call("prepare", recipe).stderr
    other = written(tmp_path, **REMEMBERED | {"seed": 78})
    assert two(CASES + "train_counting", recipe=other, run_dir=str(tmp_path / "other")) == [1, 1]


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_two_processes_make_what_one_makes(preset: str, tmp_path: Path, one: Workers, two: Workers) -> None:
    recipe = written(tmp_path, **REMEMBERED | {"ds_config": preset, "seed": 79})
    first, second = two(CASES + "prepare", recipe=recipe)
    assert first == second == one(CASES + "prepare", recipe=recipe)[0]
    assert two(CASES + "train_counting", recipe=recipe, run_dir=str(tmp_path / "run")) == [0, 0]


def test_what_was_cut_and_skipped_is_told(tmp_path: Path) -> None:
    recipe = written(tmp_path, "rm")
    good = json.dumps({"prompt": "why? " * 40, "chosen": "because", "rejected": "no"})
    (tmp_path / "train.jsonl").write_text(f"{good}\nno json\n{good.replace('because', '')}\n{good}\n")
    refused = call("prepare", recipe)
    assert refused.exit_code == 2
    assert "2 of 4 records (50.0%) cannot be used" in refused.stderr
    told = call("prepare", recipe, "--set", "data.on_error=skip")
    assert told.exit_code == 0
    assert "2 of 4 records skipped" in told.stdout
    assert "train.jsonl:2:" in told.stdout
    assert "2 prompts cut to fit data.max_length" in told.stdout
    assert "reference: none is needed" in told.stdout
    row = json.loads(call("prepare", recipe, "--set", "data.on_error=skip", "--json").stdout)
    assert row["splits"]["train"]["samples"] == 2
    assert row["splits"]["train"]["longest"] == 48


def test_several_processes_are_started_for_a_reference_alone(tmp_path: Path) -> None:
    assert not Prepare(Wish(recipe=written(tmp_path))).many
    assert Prepare(Wish(recipe=written(tmp_path, **REMEMBERED))).many


def test_a_worker_is_told_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("dstrain.commands.spread.spread", lambda *args: told.append(args) or Reply(0))
    recipe = written(tmp_path)
    words = ["--task", "rm", "--ds-config", "zero1", "--set", "seed=1", "--set", "steps=2"]
    assert call("prepare", recipe, *words, "--num-gpus", "2").exit_code == 0
    first: Prepare = told[0][0]
    assert call(*first.words()).exit_code == 0
    assert told[1][0] == first


def test_bad_data_found_by_a_worker_exits_with_2(tmp_path: Path) -> None:
    """Only workers read the data: the launch must not turn their 2 into 1, nor leave its folder."""
    recipe = written(tmp_path, **REMEMBERED)
    (tmp_path / "train.jsonl").write_text("no json\n" * 3)
    words = ["dstrain", "prepare", recipe, "--num-gpus", "2", "--launcher", "torchrun", "--set", "model.tokenizer=null"]
    done = start(words, tmp_path)
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    assert "3 of 3 records" in done.stderr
    assert not done.stdout
    assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("dstrain-")]
