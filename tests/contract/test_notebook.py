"""dstrain.train and dstrain.load give the run and the model that the commands give, in this process and in others."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import dstrain
from dstrain.commands.notebook import _to_sets
from dstrain.config import read_recipe
from dstrain.errors import TaskError, UsageError
from tests.contract.export_cases import make_run
from tests.forked import fork
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke, metric_rows, read_events


@pytest.mark.slow
def test_a_run_from_python_is_the_run_of_the_command(tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path) | {"log": {"every": 1}, "save": {"every": 2}, "seed": 3}
    process = fork(
        0, "tests.contract.notebook_cases:train", values, tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    code, said = process.wait(timeout=400), (tmp_path / "said.txt").read_text()
    assert code == 0, said[-5000:]
    assert said.count("finished: 4 steps") == 2, "also what the ranks print"
    assert metric_rows(tmp_path / "here") == metric_rows(tmp_path / "there"), "bit for bit"
    assert read_events(tmp_path / "here", "already_finished")
    here, there = (
        {path.name for path in (tmp_path / name).iterdir() if "tfevents" not in path.name} for name in ("here", "there")
    )
    assert there - here <= {"logs"}, "the same files, but for the logs of the ranks"


@pytest.mark.slow
def test_a_signal_stops_a_run_in_this_process_and_raises(tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path) | {"steps": 100_000, "save": {"every": 50_000}}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = fork(0, "tests.contract.notebook_cases:train_until_signal", values, tmp_path, env=env)
    assert process.wait(timeout=200) == 0


def test_importing_dstrain_imports_nothing_heavy() -> None:
    code = (
        "import sys, dstrain; print([name for name in ('torch', 'pydantic', 'click', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "values",
    [
        {"task": "rm", "optim": {"lr": 1e-5, "betas": (0.9, 0.95)}, "steps": 3},
        {"task": "sft", "model.path": Path("/models/a b"), "data": {"train": ["x: y.jsonl", "#1.jsonl"]}},
        {"task": "sft", "model": {"chat_template": "{%- for m in messages -%}\n'\"{{ m }}\"'\n{%- endfor -%}"}},
        {"task": "rm", "log": {"wandb": None, "tensorboard": False}, "seed": 0},
    ],
)
def test_a_dict_is_read_as_the_same_recipe_in_a_file(values: dict[str, Any], tmp_path: Path) -> None:
    plain = json.loads(json.dumps(values, default=str))
    nested = {key: value for key, value in plain.items() if "." not in key}
    if "model.path" in plain:
        nested["model"] = {"path": plain["model.path"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(nested))
    assert read_recipe(None, _to_sets(values)).config == read_recipe(tmp_path / "recipe.yaml").config


@pytest.mark.parametrize(
    ("recipe", "options", "wanted"),
    [
        ({"task": "rm", "optim": {"learning_rate": 1e-5}}, {}, r"--set optim.*learning_rate.*lr"),
        ({}, {}, "the recipe is empty"),
        ({"task": "rm"}, {"gpus": 2}, r"train\(gpus=\.\.\.\): no such option"),
        ({"task": "rm"}, {"in_process": True, "num_gpus": 2}, "trains in one process; leave num_gpus out"),
        ("nowhere.yaml", {}, "nowhere"),
    ],
)
def test_what_the_command_refuses_is_refused(recipe: Any, options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        dstrain.train(recipe, **options)


def test_a_rank_does_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="is a rank of a launcher"):
        dstrain.train({"task": "rm"})


def test_a_reward_model_is_loaded_but_writes_nothing(tmp_path: Path) -> None:
    found = dstrain.load(make_run(tmp_path, "rm"), step="last", device="cpu")
    assert found.step == 1
    assert found.tokenizer.eos_token
    ids = found.tokenizer("Hello", return_tensors="pt")["input_ids"]
    assert math.isfinite(float(found.model(input_ids=ids).logits.detach()))
    with pytest.raises(TaskError, match="does not generate text"):
        found.generate("Hello")


def test_a_long_prompt_is_cut_as_by_the_command(tmp_path: Path) -> None:
    run, text = make_run(tmp_path, "sft", {"data": {"max_prompt_length": 4}}), "How do I mend the pump? And the kettle"
    said = invoke("generate", run, "--step", "last", "--prompt", text, "--max-new-tokens", "16", "--json")
    assert said.exit_code == 0, said.output
    found = dstrain.load(run, step="last", device="cpu")
    assert found.generate(text, max_new_tokens=16) == [json.loads(said.stdout)["answer"]]
    with pytest.raises(UsageError, match="the model has 2048 positions"):
        found.generate(text, max_new_tokens=2048)
