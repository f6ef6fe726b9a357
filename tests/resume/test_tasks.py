"""Runs with a reference or with adapters resume as others do, and their checkpoints hold what learnt, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vision_recipes import named_recipe
from tests.vocabulary import RUN, read_jsonl, write_recipe
from tests.workers import Workers

LORA = {"rank": 4, "dropout": 0.1}
FROZEN = {"freeze": ["vision"]}
ALTERED = {"horizontal_flip": 0.5, "random_translate": True}
SHORT = {"prompt_template": "{question}"}
PAGES = {**SHORT, "crop": 0.1, "rotate": 5.0, "noise": 5.0, "color": 0.2}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "dpo, sharded reference": ("dpo", "zero3", {}, {}),
    "dpo, whole reference": ("dpo", "zero1", {}, {}),
    "dpo, remembered": ("dpo", "zero2", {"precompute_ref_log_probs": True}, {}),
    "dpo, adapters": ("dpo", "zero2", {}, {"lora": LORA}),
    "dpo, sharded adapters": ("dpo", "zero3", {}, {"lora": LORA}),
    "sft, sharded": ("sft", "zero3", {}, {}),
    "sft, adapters": ("sft", "zero2", {}, {"lora": LORA}),
    "kto, sharded reference": ("kto", "zero3", {}, {}),
    "distill, remembered": ("distill", "zero2", {"precompute_ref_log_probs": True}, {}),
    "distill, sharded teacher": ("distill", "zero3", {}, {}),
    "rm, adapters": ("rm", "zero1", {}, {"lora": LORA}),
    "rm, adapters, no ZeRO": ("rm", "zero0", {}, {"lora": LORA}),
    "vlm": ("vlm", "zero2", {}, {}),
    "vlm, sharded": ("vlm", "zero3", {}, {}),
    "vlm, a frozen tower": ("vlm", "zero2", {}, FROZEN),
    "vlm, a frozen tower, sharded, images altered": ("vlm, things", "zero3", ALTERED, FROZEN),
    "vlm, images altered, no ZeRO": ("vlm, things", "zero0", ALTERED, {}),
    "docqa": ("docqa", "zero2", SHORT, {}),
    "docqa, sharded adapters, pages altered": ("docqa", "zero3", PAGES, {"lora": LORA}),
    "protein": ("protein", "zero2", {"dropout": 0.1}, {}),
    "protein, sharded": ("protein", "zero3", {"dropout": 0.1, "mask": "together"}, {}),
    "temporal": ("temporal", "zero2", {}, {}),
    "temporal, align, sharded": ("temporal", "zero3", {"stage": "align"}, {}),
    "temporal, sharded adapters": ("temporal", "zero3", {}, {"lora": LORA}),
    "temporal, masked": ("temporal", "zero1", {"stage": "masked"}, {}),
    "rm, images": ("rm, with images", "zero2", {}, {}),
    "rm, images, sharded": ("rm, with images", "zero3", {}, {}),
    "dpo, images, remembered": ("dpo, with images", "zero2", {"precompute_ref_log_probs": True}, {}),
    "dpo, images, sharded reference": ("dpo, with images", "zero3", {}, {}),
    "dpo, images, adapters": ("dpo, with images", "zero2", {}, {"lora": LORA}),
    "dpo, images, sharded adapters": ("dpo, with images", "zero3", {}, {"lora": LORA}),
    "dpo, safe": ("dpo, safe", "zero2", {}, {}),
    "dpo, safe, images": ("dpo, safe, with images", "zero3", {}, {}),
    "dpo, safe, images, remembered": ("dpo, safe, with images", "zero2", {"precompute_ref_log_probs": True}, {}),
}

FAST = ("rm, adapters, no ZeRO",)
"""The rest is run by `make test-all`. Images altered: resume/test_images; a frozen tower at stage 3:
parity/test_tasks."""
MARKED = [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def written(folder: Path, case: str) -> str:
    task, preset, options, model = CASES[case]
    _, values = named_recipe(task, folder)
    values |= {
        "options": values.get("options", {}) | options,
        "steps": 8,
        "batch": {"total": 6, "micro": 2},
        "save": {"every": 4},
        "eval": {"every": 4},
    }
    values |= {"model": values["model"] | model, "ds_config": preset}
    write_recipe(folder, values)
    return str(folder / "recipe.yaml")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    told = read_jsonl(run_dir / "metrics.jsonl")
    clocks = ("time", "memory", "seconds", "second", "waited", "utilization")
    return [{name: row[name] for name in row if not any(word in name for word in clocks)} for row in told]


@pytest.mark.parametrize("case", MARKED)
def test_resuming_changes_nothing(case: str, tmp_path: Path, two: Workers) -> None:
    run = {"recipe": written(tmp_path, case), "sets": ["steps=5", "save.every=2", "eval.every=3"]}
    two(RUN, **run, run_dir=str(tmp_path / "whole"))
    two(RUN, **run, run_dir=str(tmp_path / "broken"), crash_at=4)
    again = two(RUN, **run, run_dir=str(tmp_path / "broken"))
    assert [result["code"] for result in again] == [0, 0]
    assert len(again[0]["samples"]) == 3
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole"), "bit for bit"


@pytest.mark.parametrize("case", MARKED)
def test_a_checkpoint_holds_what_learns(case: str, tmp_path: Path, two: Workers) -> None:
    recipe = written(tmp_path, case)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["steps=1"])
    (names,) = {
        tuple(names)
        for names in two("tests.resume.cases:weights_in", checkpoint=str(tmp_path / "run/checkpoints/step-00000001"))
    }
    assert names
    assert not any("reference" in name for name in names), "a reference is never saved"
    if "adapters" in case:
        assert all("lora_" in name or "modules_to_save" in name for name in names)
        assert any("lora_B" in name for name in names)
        assert ("modules_to_save" in " ".join(names)) == (CASES[case][0] in ("rm", "temporal")), "the new head"
