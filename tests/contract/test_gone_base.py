"""A checkpoint of a full fine-tuning has all weights: it is used also where the model it began with is gone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dstrain.commands.evaluate import EvaluateJob
from dstrain.commands.export import export_model
from dstrain.commands.generate import GenerateJob
from dstrain.commands.run_job import SINGLE_WORKER, run_in_process
from dstrain.commands.trained_model import ModelSelector, find_saved_model, load_trained_model
from dstrain.errors import CheckpointError, UsageError
from tests.cells import SLOW
from tests.contract.export_cases import make_run
from tests.contract.lora_cases import save_base
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke

SAMPLING: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0, "top_p": 1.0, "seed": 0, "batch": 1}


def run_from_base(folder: Path, task: str, **model: Any) -> tuple[Path, Path]:
    """(a run, the folder of the model that it began with)."""
    base = folder / "base"
    save_base(str(base), tiny_recipe("sft", folder))
    (base / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    return make_run(folder / "it", task, {"model": {"path": str(base), "config": None, **model}}), base


@pytest.mark.parametrize(
    "task", [SLOW("sft"), SLOW("rm"), "dpo"]
)  # dpo has the same kind of model; a head: contract/test_export
def test_a_run_is_used_without_the_model_that_it_began_with(task: str, tmp_path: Path) -> None:
    run, base = run_from_base(tmp_path, task)
    before = export_model(run, "last", tmp_path / "with")
    assert (run / "model/config.json").is_file()
    assert not [*(run / "model").glob("*.safetensors")]
    shutil.move(base, tmp_path / "elsewhere")
    assert export_model(run, "last", tmp_path / "without") == before
    for name in ("config.json", "model.safetensors", *(["generation_config.json"] if task == "sft" else [])):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes(), name
    recipes = [(tmp_path / kind / "dstrain_recipe.yaml").read_text() for kind in ("with", "without")]
    assert [text.count(f"ref_model: {base}") for text in recipes] == [task == "dpo"] * 2, "as it was called"
    choice = ModelSelector(folder=run, step="last")
    if task != "rm":
        (answer,) = run_in_process(
            GenerateJob(selector=choice, texts=["Hello"], sampling=SAMPLING), SINGLE_WORKER, None
        )
        assert answer["tokens"] >= 1
    if task != "dpo":
        row = run_in_process(EvaluateJob(selector=choice, data=str(tmp_path / "it/eval.jsonl")), SINGLE_WORKER, None)
        assert "RANK" not in os.environ, "the next command of this process would take itself for a rank"
        assert row["loss"] > 0
        return
    said = invoke("evaluate", str(run), "--data", str(tmp_path / "it/eval.jsonl"))
    assert said.exit_code == 2
    assert f"options.ref_model: '{base}' is not a folder" in said.output
    again = invoke(
        "evaluate", str(run), "--data", str(tmp_path / "it/eval.jsonl"), "--set", f"model.path={tmp_path}/elsewhere"
    )
    assert again.exit_code == 0, again.output


def test_what_needs_the_weights_says_how_to_name_them(tmp_path: Path) -> None:
    run, base = run_from_base(tmp_path, "sft", lora={"rank": 2})
    assert not (run / "model").exists(), "adapters lie on weights, a config would not do"
    shutil.move(base, tmp_path / "elsewhere")
    wanted = (
        "model.path: '.*base' does not exist any more, and the adapters need its weights; .*--set model.path=FOLDER"
    )
    with pytest.raises(UsageError, match=wanted):
        find_saved_model(run, "last")
    assert load_trained_model(run, "last", [f"model.path={tmp_path}/elsewhere"]).step == 1


def test_a_run_that_keeps_no_config_says_how_to_name_one(tmp_path: Path) -> None:
    run, base = run_from_base(tmp_path, "sft")
    shutil.rmtree(run / "model")
    shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(
        UsageError, match=r"and its config says how to build the model; name its folder: --set model.path"
    ):
        find_saved_model(run, "last")


def test_ties_that_the_weights_took_apart_are_not_guessed(tmp_path: Path) -> None:
    """transformers takes a tie apart where a folder holds two different tensors for it; a config does not say so."""
    base = tmp_path / "base"
    save_base(str(base), tiny_recipe("sft", tmp_path))
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    run = make_run(tmp_path / "it", "sft", {"model": {"path": str(base), "config": None}})
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match="two values for weights that the config ties"):
        load_trained_model(run, "last")


def test_a_reference_that_is_not_there_is_called_by_its_name(tmp_path: Path) -> None:
    run, _ = run_from_base(tmp_path, "dpo")
    said = invoke(
        "evaluate", str(run), "--data", str(tmp_path / "it/eval.jsonl"), "--set", "options.ref_model=/nowhere"
    )
    assert (said.exit_code, "options.ref_model: '/nowhere' is not a folder" in said.output) == (2, True), said.output
    words = ["--task", "dpo", "--set", f"model.path={tmp_path}/base", "--set", f"data.train={tmp_path}/it/eval.jsonl"]
    said = invoke("train", *words, "--set", "options.ref_model=/nowhere", "--dry-run")
    assert (said.exit_code, "options.ref_model: '/nowhere' is not a folder" in said.output) == (2, True), said.output


def test_an_image_for_a_model_that_takes_none(tmp_path: Path) -> None:
    run, _ = run_from_base(tmp_path, "sft")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    said = invoke("generate", str(run), "--prompt", "hi", "--image", str(tmp_path / "a.png"))
    assert said.exit_code == 2
    assert "--image: llama is a text-only model; leave the option out" in said.output


def test_a_model_with_another_config_is_refused(tmp_path: Path) -> None:
    run, base = run_from_base(tmp_path, "sft")
    shutil.copytree(base, tmp_path / "old")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    words = ["evaluate", str(run), "--data", str(tmp_path / "it/eval.jsonl")]
    refused = invoke(*words)
    assert refused.exit_code == 2, refused.output
    assert f"{base}: its content is not what the run was trained on (step " in refused.output
    named = invoke(*words, "--set", f"model.path={tmp_path}/old")
    assert named.exit_code == 0, named.output
