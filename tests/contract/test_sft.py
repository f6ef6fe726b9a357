"""A fine-tuned model has learnt its answers, and says so to whoever loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from tests.contract.test_export import CASES as EXPORT_CASES
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, read_jsonl, write_recipe
from tests.workers import Workers

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>{% generation %}{{ m.content }}<|e|>{% endgeneration %}"
    "{% else %}<|u|>{{ m.content }}<|e|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def written(folder: Path, templated: bool) -> str:
    values = tiny_recipe("sft", folder)
    values |= {"steps": 24, "eval": {"every": 8, "metric": "token_accuracy", "best": "max"}, "save": {"every": 24}}
    values["optim"] = {"lr": 1e-2}
    values["data"] |= {"max_length": 200}
    if templated:
        task: Any = make_task(RunConfig.model_validate(values))
        task.tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|u|>", "<|e|>"]})
        task.tokenizer.chat_template = TEMPLATE
        task.tokenizer.save_pretrained(str(folder / "tokenizer"))
        values["model"]["config"] |= {"vocab_size": len(task.tokenizer)}
        values["model"]["tokenizer"] = str(folder / "tokenizer")
    write_recipe(folder, values)
    return str(folder / "recipe.yaml")


@pytest.mark.parametrize(
    ("preset", "templated"), [pytest.param("zero2", False, marks=pytest.mark.slow), ("zero3", True)]
)
def test_answers_are_learnt_and_an_export_knows_them(
    preset: str, templated: bool, tmp_path: Path, one: Workers, two: Workers
) -> None:
    recipe, run, data = written(tmp_path, templated), str(tmp_path / "run"), str(tmp_path / "eval.jsonl")
    two(RUN, recipe=recipe, run_dir=run, sets=[f"ds_config={preset}", "precision=fp32"])
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    first, *_, last = [row for row in rows if row["split"] == "eval"]
    assert last["loss"] < 0.8 * first["loss"]
    assert 1 >= last["token_accuracy"] > first["token_accuracy"] > 0

    told = one("tests.contract.sft_cases:export", run=run, to=str(tmp_path / "out"), data=data)[0]
    again = one(EXPORT_CASES + "evaluate", folder=str(tmp_path / "out"), data=data)[0]
    assert told["difference"] <= 1e-5
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(told["files"])
    for found in (told, again):  # transformers alone, one dialog at a time; and our own evaluation of the export
        assert found["loss"] == pytest.approx(last["loss"], rel=1e-5)
        assert found["token_accuracy"] == pytest.approx(last["token_accuracy"], abs=0.01), "but for a tie of two tokens"


def test_a_file_is_checked_for_what_sft_can_learn(tmp_path: Path) -> None:
    good = {"instruction": "2+2?", "output": "4"}
    rows = [good, {"instruction": "2+2?", "output": " "}, {"text": "four"}, {"messages": []}, good]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = CliRunner().invoke(main, ["data", "check", str(tmp_path / "mixed.jsonl"), "--task", "sft"])
    assert found.exit_code == 2
    assert "mixed.jsonl:2: 'output' (turn 2 of the dialog) is an empty answer" in found.output
    assert "mixed.jsonl:4: 'messages' has no turn of the assistant" in found.output
    assert "mixed.jsonl:3" not in found.output


def test_real_preferences_can_be_fine_tuned_on(data: Path) -> None:
    for name in ("hh/helpful-test.jsonl", "prefs/llamafactory/dpo_en_demo.json", "prefs/pandalm.jsonl"):
        found = CliRunner().invoke(main, ["data", "check", str(data / name), "--task", "sft"])
        assert found.exit_code == 0, found.output
