"""Resolution of a command's recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.commands.recipe_args import resolve_paths
from dstrain.config import read_recipe
from dstrain.errors import TaskError
from dstrain.tasks import find_task


def test_paths_of_a_recipe_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "recipe.yaml").write_text("task: rm\ndata: {train: train.jsonl}\n")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    config = resolve_paths(recipe.config, recipe.folder)
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")


def test_the_judge_of_answers_is_looked_up_next_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "judge").mkdir()
    text = "task: sft\ndata: {train: train.jsonl, eval_fraction: 0.5}\neval: {generate: {reward_model: ./judge}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    found = resolve_paths(recipe.config, recipe.folder).eval.generate
    assert found is not None
    assert found.reward_model == str(tmp_path / "judge")


OWN_TASK = """
from dataclasses import dataclass

from dstrain.tasks.rm import RewardModel


@dataclass(frozen=True, kw_only=True)
class Own(RewardModel):
    path_options = {names}
    ref_model: str | None = None
"""


@pytest.mark.parametrize("names", ["()", '("ref_model",)'])
def test_only_options_that_a_task_calls_paths_are_looked_up_next_to_the_recipe(names: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "own.py").write_text(OWN_TASK.format(names=names))
    (tmp_path / "other").mkdir()
    text = "task: ./own.py\ndata: {train: train.jsonl}\noptions: {ref_model: ./other}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    found = resolve_paths(recipe.config, recipe.folder).options["ref_model"]
    assert found == ("./other" if names == "()" else str(tmp_path / "other"))


def test_a_path_option_that_the_task_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK.format(names='("ref_modell",)'))
    with pytest.raises(
        TaskError, match="path_options names 'ref_modell', which is no option of Own; did you mean 'ref_model'"
    ):
        find_task(str(tmp_path / "own.py"))
