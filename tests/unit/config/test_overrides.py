"""The command line is the later word: a key that it sets takes the place of the file's that excludes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.config import RunConfig, read_recipe, resolve_batch
from dstrain.errors import RecipeError

MODEL = "model: {config: {model_type: llama}, tokenizer: {vocab_size: 300}}"


def read(folder: Path, text: str, *sets: str) -> RunConfig:
    (folder / "r.yaml").write_text(f"task: rm\n{text}\n")
    return read_recipe(folder / "r.yaml", sets).config


@pytest.mark.parametrize(
    ("text", "sets", "wanted"),
    [
        ("epochs: 3", ["steps=10"], {"steps": 10, "epochs": None}),
        ("steps: 10", ["epochs=0.5"], {"steps": None, "epochs": 0.5}),
        ("steps: 10", ["epochs=null"], {"steps": 10, "epochs": None}),
        ("epochs: 3", ["steps=10", "epochs=null"], {"steps": 10, "epochs": None}),
        ("steps: 10\nepochs: 3", ["steps=20"], {"steps": 20, "epochs": None}),
    ],
)
def test_steps_and_epochs_take_the_place_of_each_other(
    text: str, sets: list[str], wanted: dict[str, Any], tmp_path: Path
) -> None:
    config = read(tmp_path, text, *sets)
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_held_out_data_is_a_file_or_a_share(tmp_path: Path) -> None:
    data = read(tmp_path, "data: {eval: a/b}", "data.eval_fraction=0.1").data
    assert (data.eval, data.eval_fraction) == (None, 0.1)
    data = read(tmp_path, "data: {eval_fraction: 0.1}", "data.eval=a/b").data
    assert data.eval is not None
    assert data.eval_fraction == 0
    data = read(tmp_path, "data: {eval: a/b}", "data.eval_fraction=0").data
    assert data.eval is not None, "a share of nothing asks for nothing"


def test_a_model_is_loaded_or_built(tmp_path: Path) -> None:
    model = read(tmp_path, MODEL, "model.path=/m").model
    assert (model.path, model.config, model.tokenizer) == ("/m", None, None), (
        "a trained tokenizer fits no loaded weights"
    )
    model = read(tmp_path, "model: {path: /m}", "model.config={model_type: llama}").model
    assert (model.path, model.config) == (None, {"model_type": "llama"})


def test_a_setting_inside_a_config_does_not_unload_the_weights(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.path and model\.config are both set"):
        read(tmp_path, "model: {path: /m}", "model.config.model_type=llama")


def test_both_on_the_command_line_are_refused(tmp_path: Path) -> None:
    for text in ("seed: 0", "steps: 3", "epochs: 3"):
        with pytest.raises(RecipeError, match=r"^--set epochs: epochs and steps are both set; remove one$"):
            read(tmp_path, text, "steps=1", "epochs=1")


@pytest.mark.parametrize(
    ("text", "sets", "wanted"),
    [
        ("{micro: 2, accumulate: 3}", ["batch.total=8"], (8, 2, None)),
        ("{total: 8, accumulate: 2}", ["batch.micro=1"], (8, 1, None)),
        ("{total: 8, micro: 2}", ["batch.accumulate=2", "batch.total=4"], (4, None, 2)),
        ("{total: 8, micro: 2}", ["batch.accumulate=2", "batch.micro=1"], (None, 1, 2)),
        ("{total: 8, micro: 2, accumulate: 4}", ["batch.micro=1"], (8, 1, None)),
        ("{total: 8, micro: 2}", ["batch={micro: 1, accumulate: 1}"], (None, 1, 1)),
        ("{total: 8, accumulate: 2}", ["batch.tokens_per_micro=512"], (8, None, None)),
        ("{total: 8, tokens_per_micro: 512}", ["batch.accumulate=2"], (8, None, 2)),
    ],
)
def test_a_batch_keeps_what_the_command_line_says(
    text: str, sets: list[str], wanted: tuple[int | None, ...], tmp_path: Path
) -> None:
    batch = read(tmp_path, f"batch: {text}", *sets).batch
    assert (batch.total, batch.micro, batch.accumulate) == wanted


def test_accumulate_alone_says_not_what_changes(tmp_path: Path) -> None:
    batch = read(tmp_path, "batch: {total: 8, micro: 2}", "batch.accumulate=2").batch
    with pytest.raises(RecipeError, match=r"^batch\.total: is 8, but micro 2 x accumulate 2 x 1 process = 4; remove "):
        resolve_batch(batch, 1)
    assert resolve_batch(batch, 2).total == 8
