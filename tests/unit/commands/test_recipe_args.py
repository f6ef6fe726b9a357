"""Resolution of a command's recipe."""

from __future__ import annotations

from pathlib import Path

from dstrain.commands.recipe_args import resolve_paths
from dstrain.config import read_recipe


def test_paths_of_a_recipe_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "recipe.yaml").write_text("task: rm\ndata: {train: train.jsonl}\n")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    config = resolve_paths(recipe.config, recipe.folder)
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")
