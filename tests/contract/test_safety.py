"""Safety options from outside: printed, set on the command line, and their data checked with line and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.init import render_recipe_template
from tests.tiny import tiny_recipe
from tests.vision_recipes import named_recipe
from tests.vocabulary import RUN, invoke, read_events, read_jsonl, write_jsonl, write_recipe
from tests.workers import Workers

SAFEDPO = "options.safety.method=safedpo"


def test_a_block_of_options_is_printed_with_its_options() -> None:
    printed = invoke("tasks", "dpo").output
    assert "  safety: SafetyOptions | None = None\n" in printed
    assert "\n      delta: float = 10.0\n          SafeDPO's offset" in printed


def test_a_starter_recipe_has_the_block_as_a_comment() -> None:
    text = render_recipe_template("dpo")
    assert yaml.safe_load(text)["options"]["safety"] is None
    block = [line.removeprefix("  # ") for line in text.splitlines() if line.startswith("  # ")]
    start = block.index("safety:")
    assert yaml.safe_load("\n".join(block[start : start + 13]))["safety"]["delta"] == 10.0


@pytest.mark.parametrize("safety", [None, {"anchor_weight": 1.0}])
def test_an_option_of_a_block_is_set_by_its_dotted_name(safety: dict[str, Any] | None, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_recipe("dpo", tmp_path) | {"options": {"safety": safety}})
    result = invoke("train", recipe, "--dry-run", "--set", "options.safety.anchor_weight=0.5")
    assert result.exit_code == 0, result.output
    assert "anchor_weight: 0.5" in result.output


def test_an_unknown_option_of_a_block_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    result = invoke(
        "train", write_recipe(tmp_path, tiny_recipe("dpo", tmp_path)), "--dry-run", "--set", "options.safety.dleta=5"
    )
    assert result.exit_code == 2
    assert "options.safety.dleta: is not an option of options.safety; did you mean 'delta'?" in result.output


def test_faulty_labels_are_named_with_line_and_fix(tmp_path: Path) -> None:
    pair = {"prompt": "How?", "chosen": "So.", "rejected": "No."}
    labels: list[dict[str, Any]] = [
        {"chosen_safe": True, "rejected_safe": 0},
        {},
        {"chosen_safe": "yes", "rejected_safe": 1},
    ]
    file = write_jsonl(tmp_path / "pairs.jsonl", [pair | one for one in labels])
    result = invoke("data", "check", file, "--task", "dpo", "--set", SAFEDPO)
    assert result.exit_code == 2
    assert "pairs.jsonl:2: no 'chosen_safe'; write true or false" in result.output
    assert (
        "pairs.jsonl:3: 'chosen_safe' is 'yes'; write true for a safe answer, false for an unsafe one" in result.output
    )
    assert "1 good records, 2 bad" in result.output
    assert invoke("data", "check", file, "--task", "dpo").exit_code == 0, "plain dpo reads no labels"


def test_prepare_counts_reordered_and_dropped_pairs(tmp_path: Path) -> None:
    _, values = named_recipe("dpo, safe", tmp_path)
    output = invoke("prepare", write_recipe(tmp_path, values)).output
    assert "train: 24 pairs reordered, 8 of two unsafe answers dropped" in output
    assert "eval: 6 pairs reordered, 2 of two unsafe answers left out of the loss" in output


def test_reordered_and_dropped_pairs_are_counted_by_split(tmp_path: Path, two: Workers) -> None:
    _, values = named_recipe("dpo, safe", tmp_path)
    values |= {"steps": 2, "eval": {"every": 2, "metric": "harmless_margin", "best": "max"}}
    two(RUN, recipe=str(write_recipe(tmp_path, values)), run_dir=str(tmp_path / "run"))
    counts = [(e["split"], e["pairs_reordered"], e["pairs_dropped"]) for e in read_events(tmp_path / "run", "data")]
    assert counts == [("train", 24, 8), ("eval", 6, 2)]
    assert read_events(tmp_path / "run", "started")[0]["train_samples"] == 56
    held_out = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["split"] == "eval"][-1]
    assert {"harmless_margin", "helpful_margin", "accuracy", "loss"} <= held_out.keys(), json.dumps(held_out)
