"""Task temporal from a language model's folder to captions: its stages follow one another, on files of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config.schema import RunConfig
from dstrain.errors import RecipeError
from dstrain.tasks import make_task
from dstrain.tasks.temporal.task import names_right_pattern
from tests.contract.test_generate import GENERATE
from tests.resume.test_tasks import rows
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, read_jsonl, write_jsonl, write_recipe
from tests.workers import Workers

EVALUATE, EXPORT = "tests.contract.export_cases:evaluate", "tests.contract.export_cases:export_only"


def recipe(folder: Path, preset: str, options: dict[str, Any], **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    values = tiny_recipe("temporal", folder) | {"ds_config": preset, "batch": {"total": 6, "micro": 2}}
    values["options"] |= options
    values |= {"steps": 6, "save": {"every": 6}, "eval": {"every": 3}} | changes
    return str(write_recipe(folder, values))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, as on the Hub."""
    folder = tmp_path_factory.mktemp("language")
    save_language_model(folder / "base", tiny_recipe("temporal", folder))
    return folder / "base"


def save_language_model(folder: Path, values: dict[str, Any]) -> None:
    """Save the language model of a tiny recipe with its head and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    task: Any = make_task(RunConfig.model_validate(values))
    task.tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(task.model_source.language_source.build_config(task.recipe.model)).save_pretrained(
        folder
    )


LEARNT = 80
"""Steps after which the captions name the right pattern."""


@pytest.mark.slow  # resume/test_elastic, contract/test_docqa (answers), parity/test_tasks [temporal, *-3]
@pytest.mark.parametrize("steps", [12, LEARNT])
def test_captions_are_learnt_and_generated(steps: int, tmp_path: Path, one: Workers, two: Workers) -> None:
    """Resumed at another world size and ZeRO stage on the way."""
    half = steps // 2
    sizes: dict[str, Any] = {"steps": steps, "optim": {"lr": 1e-2}, "save": {"every": half}, "eval": {"every": half}}
    file = recipe(tmp_path, "zero3", {}, **sizes)
    two(RUN, recipe=file, run_dir=str(tmp_path / "run"), crash_at=half + 2)
    one(RUN, recipe=file, run_dir=str(tmp_path / "run"), sets=["ds_config=zero1"])
    data = str(tmp_path / "eval.jsonl")
    ask = {"folder": str(tmp_path / "run"), "sampling": {"max_new_tokens": 8, "batch": 2}}
    written = one(GENERATE, **ask, data=data)[0]
    captions = [record["caption"] for record in read_jsonl(tmp_path / "eval.jsonl")]
    scores = [names_right_pattern(row["answer"], [one]) for row, one in zip(written, captions, strict=True)]
    if steps == LEARNT:
        assert sum(scores) / len(scores) > 0.8, "it has learnt to read a curve"
    assert rows(tmp_path / "run")[-1]["pattern_accuracy"] == pytest.approx(sum(scores) / len(scores))
    bare = [{"series": record["series"]} for record in read_jsonl(tmp_path / "eval.jsonl")]
    assert one(GENERATE, **ask, data=str(write_jsonl(tmp_path / "bare.jsonl", bare)))[0] == written
    assert two(EVALUATE, folder=str(tmp_path / "run"), data=data, ds_config="zero3")[0]["pattern_accuracy"] == sum(
        scores
    ) / len(scores)


@pytest.mark.slow  # the encoder's weights: unit/models/test_temporal, unit/tasks/test_temporal
def test_a_classifier_begins_with_an_encoder_that_filled_in_patches(tmp_path: Path, one: Workers) -> None:
    file = recipe(tmp_path / "masked", "zero2", {"stage": "masked"}, model={})
    one(RUN, recipe=file, run_dir=str(tmp_path / "masked/run"))
    one(EXPORT, run=str(tmp_path / "masked/run"), to=str(tmp_path / "encoder"))
    options = {"stage": "classify", "encoder": {}}
    model, metric = {"path": str(tmp_path / "encoder")}, {"every": 3, "metric": "accuracy", "best": "max"}
    file = recipe(tmp_path / "classify", "zero3", options, model=model, eval=metric, steps=60, optim={"lr": 3e-3})
    one(RUN, recipe=file, run_dir=str(tmp_path / "classify/run"))
    one(EXPORT, run=str(tmp_path / "classify/run"), to=str(tmp_path / "classifier"), step="best")
    found = one(EVALUATE, folder=str(tmp_path / "classifier"), data=str(tmp_path / "classify/eval.jsonl"))[0]
    assert found["accuracy"] > 0.8


def test_the_packaged_recipe_aligns_and_keeps_every_epoch(base: Path) -> None:
    sets = [f"model.path={base}", "options.synthetic.num_samples=50"]
    recipe = resolve_recipe(TrainRequest(recipe="temporal", overrides=sets)).config
    task: Any = make_task(recipe)
    task.checks.required_keys()
    task.checks.run()
    assert (recipe.eval.every, recipe.save.every, recipe.save.keep) == ("epoch", "epoch", None)
    assert (recipe.eval.metric, recipe.eval.best, recipe.log.tensorboard) == ("pattern_accuracy", "max", True)
    assert len(task.examples("eval")) == 1


def test_the_packaged_recipe_says_that_a_model_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = invoke("train", "temporal", "--dry-run")
    assert found.exit_code == 2
    missing = "error: temporal.yaml:12 model.path: is not set, nor is model.config; set model.path, or model.config to train from scratch"
    assert found.stderr.splitlines() == [missing]


def test_data_check_reads_files_of_series(tmp_path: Path) -> None:
    (tmp_path / "x.ts").write_text("@univariate true\n@classLabel true a b\n@data\n1,2,3:a\n1,?,x:b\n?,?:a\n")
    found = invoke("data", "check", tmp_path / "x.ts", "--task", "temporal", "--set", "options.stage=classify")
    assert found.exit_code == 2
    assert "x.ts:5: 'x' in channel 1 is not a number" in found.output
    assert "x.ts:6: 'series' has no value, all are missing; remove the record" in found.output
    (tmp_path / "x.csv").write_text("t0,t1,caption\n1,2,rises\n2,1,falls\n")
    assert invoke("data", "check", tmp_path / "x.csv", "--task", "temporal").exit_code == 0


def test_a_vision_language_model_is_refused(tmp_path: Path) -> None:
    values = tiny_recipe("temporal", tmp_path) | {"model": tiny_recipe("vlm", tmp_path)["model"]}
    with pytest.raises(RecipeError, match="llava takes images; task temporal needs a text-only model"):
        make_task(RunConfig.model_validate(values)).checks.run()
