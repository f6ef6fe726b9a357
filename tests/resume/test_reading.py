"""A checkpoint that does not fit is refused with a sentence, by every rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.resume.elastic_cases import SHAPE, save_model
from tests.workers import Workers

CASES = "tests.resume.elastic_cases:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(model: str, tmp_path_factory: pytest.TempPathFactory, two: Workers) -> str:
    """Of two processes at stage 2, with adapters."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return two(f"{CASES}source", folder=folder, after=0, model=model, kind="lora", preset="zero2")[0]["checkpoint"]


def test_another_rank_of_adapters_is_refused_by_name(model: str, checkpoint: str, two: Workers) -> None:
    told = two(f"{CASES}refused", checkpoint=checkpoint, model=model, kind="lora", preset="zero3",
               more_model={"lora": {"rank": 4, "alpha": 6.0}})  # fmt: skip
    assert told[0] == told[1]
    assert "lora_A" in told[0]
    assert "has another shape in the recipe's model" in told[0]


def test_a_model_without_the_adapters_is_refused_by_name(model: str, checkpoint: str, two: Workers) -> None:
    told = two(f"{CASES}refused", checkpoint=checkpoint, model=model, kind="full", preset="zero1")
    assert told[0] == told[1]
    assert "missing keys: scale, model.embed_tokens.weight, " in told[0]
    assert "the recipe's model is not the one that was trained" in told[0]


def test_another_model_is_refused_by_name(model: str, tmp_path: Path, two: Workers) -> None:
    save_model(str(tmp_path / "other"), {**SHAPE, "num_hidden_layers": 3})
    wrote = two(f"{CASES}source", folder=str(tmp_path), after=0, model=model, kind="full", preset="zero3")
    made = {"model": str(tmp_path / "other"), "kind": "full", "preset": "zero3"}
    told = two(f"{CASES}refused", checkpoint=wrote[0]["checkpoint"], **made)
    assert told[0] == told[1]
    assert "missing keys: model.layers.2." in told[0]


@pytest.mark.parametrize(("fails", "why"), [("open", "OSError: stale file handle"), ("read", "no such range")])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_what_one_rank_cannot_read_all_refuse(
    fails: str, why: str, preset: str, model: str, checkpoint: str, two: Workers
) -> None:
    told = two(f"{CASES}refused", checkpoint=checkpoint, fails=fails, model=model, kind="lora", preset=preset)
    assert told[0] == told[1]
    assert told[0].startswith("rank 1: ")
    assert why in told[0]


def test_a_checkpoint_of_before_this_format_is_refused_with_a_sentence(
    model: str, checkpoint: str, tmp_path: Path, two: Workers
) -> None:
    old = tmp_path / "step-00000003"
    shutil.copytree(checkpoint, old)
    shutil.rmtree(old / "state")
    manifest = json.loads((old / "MANIFEST.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not name.startswith("state")}
    (old / "MANIFEST.json").write_text(json.dumps(manifest))
    told = two(f"{CASES}refused", checkpoint=str(old), model=model, kind="lora", preset="zero2")
    assert told[0] == told[1]
    assert "has no state that this version can read; choose another checkpoint" in told[0]
