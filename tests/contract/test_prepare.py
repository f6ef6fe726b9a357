"""After `dstrain prepare` training starts at once, and nothing else is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.data import NO_TOKENIZER_HINT
from dstrain.commands.prepare import PrepareJob
from dstrain.commands.recipe_args import TrainRequest
from dstrain.commands.run_job import JobResult
from dstrain.config import RunConfig
from dstrain.tasks import make_task
from dstrain.training.messages import describe_splits
from tests.cells import SLOW
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"


def written(folder: Path, task: str = "dpo", **values: Any) -> str:
    recipe = tiny_recipe(task, folder) | values
    write_recipe(folder, recipe)
    return str(folder / "recipe.yaml")


REMEMBERED = {"options": {"precompute_ref_log_probs": True}, "steps": 1, "seed": 77}


def test_training_asks_no_reference_after_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Workers
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = written(tmp_path, **REMEMBERED)
    result = invoke("prepare", recipe)
    assert result.exit_code == 0
    assert "train: 64 samples" in result.stdout
    assert "its outputs for all samples are cached" in result.stdout
    assert "reference: 64 samples to compute" in result.stderr
    assert not list((tmp_path / "here").iterdir())
    assert two(CASES + "train_counting", recipe=recipe, run_dir=str(tmp_path / "run")) == [0, 0]
    assert "to compute" not in invoke("prepare", recipe).stderr
    other = written(tmp_path, **REMEMBERED | {"seed": 78})
    assert two(CASES + "train_counting", recipe=other, run_dir=str(tmp_path / "other")) == [1, 1]


@pytest.mark.parametrize("preset", [SLOW("zero2"), "zero3"])  # stage 2: parity/test_tasks
def test_two_processes_make_what_one_makes(preset: str, tmp_path: Path, one: Workers, two: Workers) -> None:
    recipe = written(tmp_path, **REMEMBERED | {"ds_config": preset, "seed": 79})
    first, second = two(CASES + "prepare", recipe=recipe)
    assert first == second == one(CASES + "prepare", recipe=recipe)[0]
    assert two(CASES + "train_counting", recipe=recipe, run_dir=str(tmp_path / "run")) == [0, 0]


def test_what_was_cut_and_skipped_is_told(tmp_path: Path) -> None:
    asked = "\n\nHuman: why? why?\n\nAssistant: so\n\nHuman: why not?\n\nAssistant:"
    good = json.dumps({"chosen": f"{asked} because", "rejected": f"{asked} no"})
    lines = f"{good}\nno json\n{good.replace('because', '')}\n{good}\n"
    recipe = written(tmp_path, "rm", data={"train": str(tmp_path / "train.jsonl"), "max_length": 48})
    (tmp_path / "train.jsonl").write_text(lines)
    refused = invoke("prepare", recipe)
    assert refused.exit_code == 2
    assert "2 of 4 records (50.0%) cannot be used" in refused.stderr
    told = invoke("prepare", recipe, "--set", "data.on_error=skip")
    assert told.exit_code == 0, told.stderr
    assert "2 of 4 records skipped" in told.stdout
    assert "train.jsonl:2:" in told.stdout
    assert "  of 2 samples, 0 had an answer cut and 2 their prompt, none its last user turn\n" in told.stdout
    assert "reference: none is needed" in told.stdout
    row = json.loads(invoke("prepare", recipe, "--set", "data.on_error=skip", "--json").stdout)
    assert row["splits"]["train"]["samples"] == 2
    assert row["splits"]["train"]["longest"] == 48


def test_a_check_that_knows_the_model_tells_what_is_cut_and_what_does_not_fit(tmp_path: Path) -> None:
    recipe = written(tmp_path, "rm")
    task = make_task(RunConfig.model_validate(yaml.safe_load(Path(recipe).read_text())))
    task.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(task.model_source.config.to_json_string())
    asked = "\n\nHuman: why? why?\n\nAssistant: so\n\nHuman: why not?\n\nAssistant:"
    rows = [
        {"chosen": f"{asked} because", "rejected": f"{asked} no"},
        {"prompt": "why " * 40, "chosen": "b", "rejected": "n"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["data", "check", str(tmp_path / "pairs.jsonl"), "--task", "rm"]
    plain = invoke(*words)
    total, columns, hint = plain.stdout.splitlines()
    assert (plain.exit_code, total, hint) == (0, "2 good records, 0 bad", NO_TOKENIZER_HINT)
    assert columns.endswith("pairs.jsonl: 2 records; read: chosen, rejected, prompt (1)")
    known = invoke(*words, "--set", f"model.path={tmp_path / 'model'}", "--set", "data.max_length=48")
    assert known.exit_code == 2
    assert "pairs.jsonl:2: its last user turn and the start of the answer take " in known.stdout
    total, _, cuts = known.stderr.splitlines()
    assert total == "1 good records, 1 bad"
    assert cuts == "of 1 samples, 0 had an answer cut and 1 their prompt, none its last user turn"


def test_the_start_of_a_run_tells_what_is_cut(tmp_path: Path) -> None:
    cuts = {"response_cut": 1, "prompt_cut": 2, "last_turn_cut": 0}
    train, other = {"kept": 9, "cuts": cuts}, {"kept": 8, "cuts": cuts}
    line = "samples, 1 had an answer cut and 2 their prompt, none its last user turn"
    assert describe_splits({"train": train, "eval": other}) == [f"train: of 9 {line}", f"eval: of 8 {line}"]
    assert describe_splits({"train": train, "eval": dict(train)}) == [f"data: of 9 {line}"]
    assert describe_splits({"train": train}) == [f"train: of 9 {line}"]
    skipped = {"read": 20, "skipped": 12, "skipped_records": [f"a.jsonl:{number}: why" for number in range(12)]}
    first, *listed, last = describe_splits({"train": skipped})
    assert (first, last) == ("train: 12 of 20 records skipped:", "train:   … and 2 more")
    assert listed == [f"train:   a.jsonl:{number}: why" for number in range(10)]
    assert describe_splits({"train": {"kept": 9, "cuts": {}}}) == describe_splits({}) == []


def test_several_processes_are_started_for_a_reference_alone(tmp_path: Path) -> None:
    assert not PrepareJob(TrainRequest(recipe=written(tmp_path))).is_parallel
    assert PrepareJob(TrainRequest(recipe=written(tmp_path, **REMEMBERED))).is_parallel


def test_a_worker_is_told_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("dstrain.commands.run_job.run_job", lambda *args: told.append(args) or JobResult(0))
    recipe = written(tmp_path)
    words = ["--task", "rm", "--ds-config", "zero1", "--set", "seed=1", "--set", "steps=2"]
    assert invoke("prepare", recipe, *words, "--num-gpus", "2").exit_code == 0
    first: PrepareJob = told[0][0]
    assert invoke(*first.to_argv()).exit_code == 0
    assert told[1][0] == first


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_tokens_are_prepared_where_the_attention_cannot_run(name: str, tmp_path: Path) -> None:
    """On a login node without a GPU; the cached outputs of a reference need the attention."""
    changes = ("--set", f"model.attn_implementation={name}", "--set", "model.trust_remote_code=true")
    result = invoke("prepare", written(tmp_path, seed=80), *changes)
    assert (result.exit_code, "train: 64 samples" in result.stdout) == (0, True), result.stderr
    result = invoke("prepare", written(tmp_path, **REMEMBERED | {"seed": 80}), *changes)
    assert (result.exit_code, "model.attn_implementation: " in result.stderr) == (2, True)
