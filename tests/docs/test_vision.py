"""Recipes and examples of vision-language models are complete, ask for missing values, and run."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.recipe_args import RECIPES_DIR, TrainRequest, resolve_recipe
from dstrain.config import read_recipe
from dstrain.models.load import read_config
from dstrain.models.params import freeze
from dstrain.tasks import default_learning_rate, make_task
from dstrain.training.build_model import build_model
from dstrain.training.build_run import summarize_components
from tests.tiny import LLAVA, tiny_recipe
from tests.vocabulary import invoke, read_jsonl
from tests.workers import ROOT

UNFILLED = ("vlm-pretrain", "vlm-sft")
LEARNING = {"vlm-pretrain": {"projector"}, "vlm-sft": {"projector", "language"}}


@pytest.mark.parametrize("name", [*UNFILLED, "docqa", "rm-helpful", "rm-harmless", "safe-mm-dpo"])
@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["prepare"]])
def test_a_recipe_to_fill_in_says_what_is_missing_and_starts_nothing(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dstrain.commands.train.supervise", None)
    found = invoke(*command, name)
    assert found.exit_code == 2
    assert [re.sub(rf"{name}\.yaml(:\d+)? ", "", line) for line in found.stderr.splitlines()] == [
        "error: model.path: is not set, nor is model.config; set model.path, or model.config to train from scratch",
        "data.train: is not set; write `data: {train: pairs.jsonl}`",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", UNFILLED)
def test_a_recipe_filled_in_trains_the_parts_it_names(name: str, tmp_path: Path) -> None:
    tiny_recipe("vlm", tmp_path)
    sets = [f"model.config={json.dumps(LLAVA)}", f"data.train={tmp_path}/train.jsonl"]
    task = make_task(resolve_recipe(TrainRequest(recipe=name, overrides=sets)).config)
    task.checks.run()
    model = task.build_model()
    freeze(model, task.recipe.model.freeze)
    learning = {one.component for one in summarize_components(model, task.recipe.optim) if one.num_trainable}
    assert learning == LEARNING[name]


def test_the_recipe_of_documents_filled_in_trains_adapters(tmp_path: Path) -> None:
    tiny_recipe("docqa", tmp_path)
    sets = [f"model.config={json.dumps(LLAVA)}", f"data.train={tmp_path}/train.jsonl", "data.eval_fraction=0.1"]
    recipe = resolve_recipe(TrainRequest(recipe="docqa", overrides=sets)).config
    task = make_task(recipe)
    task.checks.run()
    assert (recipe.eval.metric, recipe.eval.best, recipe.ds_config) == ("exact_match", "max", "zero2_offload")
    model = build_model(task)
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert recipe.optim.lr == default_learning_rate(type(task), use_lora=True)


def test_the_lines_that_are_commented_out_read_clean(tmp_path: Path) -> None:
    text = (RECIPES_DIR / "vlm-sft.yaml").read_text()
    lines = re.sub(r"^( +)# (?=(lora|groups): )", r"\1", text, flags=re.M)
    assert lines.count("\n  groups: ") == lines.count("\n  lora: ") == 1
    (tmp_path / "mine.yaml").write_text(lines)
    config = read_recipe(tmp_path / "mine.yaml").config
    assert config.optim.groups["vision"].lr == pytest.approx(config.optim.lr / 10)
    assert config.model.lora is not None


def test_the_demos_images_are_those_its_script_draws(tmp_path: Path) -> None:
    folder = RECIPES_DIR / "demo-vlm"
    subprocess.run([sys.executable, ROOT / "tools/make_demo_vlm.py", tmp_path], check=True)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    assert names == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    for split in ("train.jsonl", "eval.jsonl"):
        assert (folder / split).read_text() == (tmp_path / split).read_text()
    assert len(names) <= 202
    assert sum((folder / name).stat().st_size for name in names) < 150_000
    config = read_config(read_recipe(RECIPES_DIR / "demo-vlm.yaml").config.model)
    assert config.text_config.vocab_size < 256


def run(command: list[str], folder: Path, seconds: float) -> str:
    folder.mkdir(exist_ok=True)
    quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_says_what_is_there(tmp_path: Path) -> None:
    run(["dstrain", "train", "demo-vlm", "--num-gpus", "2", "--run-dir", "run"], tmp_path, 1200)
    held_out = [row for row in rows(tmp_path / "run") if row["split"] == "eval"]
    assert max(row["exact_match"] for row in held_out) > 0.9
    image = str(RECIPES_DIR / "demo-vlm/images/eval-0.png")
    told = run(["dstrain", "generate", "run", "--image", image, "--prompt", "What is there?", "--json"], tmp_path, 120)
    records = read_jsonl(RECIPES_DIR / "demo-vlm/eval.jsonl")
    (wanted,) = [one["answer"] for one in records if one["image"] in image and one["question"] == "What is there?"]
    assert json.loads(told)["answer"].strip() == wanted


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "metrics.jsonl")


@pytest.fixture(scope="module", params=["zero2", "zero3"])
def chain(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What docs/examples/vlm_chain.sh made, and what it said."""
    if not (data / "mm").is_dir():
        pytest.skip(f"no images in {data}")
    folder = tmp_path_factory.mktemp("chain")
    start = time.perf_counter()
    said = run(["sh", str(ROOT / "docs/examples/vlm_chain.sh"), str(data / "mm"), request.param, "out"], folder, 1800)
    print(f"{request.param}: {time.perf_counter() - start:.0f} s\n{said}")
    return folder / "out", said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_captions_to_a_policy_each_stage_begins_with_the_one_before(chain: tuple[Path, str]) -> None:
    out, said = chain
    for stage in ("captions", "answers", "judge", "policy"):
        events = [json.loads(line)["event"] for line in (out / stage / "events.jsonl").read_text().splitlines()]
        assert "finished" in events, stage
        assert (out / f"{stage}-model/processor_config.json").is_file()
        assert all(math.isfinite(row["loss"]) for row in rows(out / stage))
    first = rows(out / "policy")[0]
    assert (first["step"], first["split"]) == (1, "train")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5), "policy and reference are still one"
    before, after = (json.loads((out / f"judge-{kind}.json").read_text()) for kind in ("run", "export"))
    for name in ("loss", "accuracy", "margin"):
        assert after[name] == pytest.approx(before[name], abs=1e-6)
    assert (out / "judge-model/score.safetensors").is_file()
    assert said.count("--- answer, ") == 3


@pytest.mark.slow
def test_scores_read_in_python_are_those_of_the_run(chain: tuple[Path, str], data: Path, tmp_path: Path) -> None:
    out, said = chain
    chosen, rejected = map(float, re.findall(r"score of the \w+ answer: (\S+)", said))
    records = (data / "mm/mathv/preferences-test.jsonl").read_text(encoding="utf-8").splitlines()
    record = json.loads(records[0])
    record["image"] = str(data / "mm/mathv" / record["image"])
    (tmp_path / "one.jsonl").write_text(json.dumps(record) + "\n")
    told = run(["dstrain", "evaluate", str(out / "judge-model"), "--data", "one.jsonl", "--json"], tmp_path, 120)
    assert chosen - rejected == pytest.approx(json.loads(told)["margin"], abs=2e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_day_of_a_user_ends_with_a_model_that_others_load(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (data / "mm").is_dir() or not (data / "hh").is_dir():
        pytest.skip(f"no dialogs or images in {data}")
    monkeypatch.setenv("STEPS", "2")
    said = run(["sh", str(ROOT / "docs/examples/user-day.sh"), str(data), "out"], tmp_path, 1800)
    assert "adapter and merged model agree; dstrain was not imported" in said
    assert "\nlibrary_name: transformers\n" in said
    assert 0 < len(read_jsonl(tmp_path / "out/scores-dpo.jsonl")) <= 8
    assert (tmp_path / "out/answers/processor_config.json").is_file()
