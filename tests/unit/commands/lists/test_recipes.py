"""The list of recipes says what each needs and how to run it."""

from __future__ import annotations

import shlex

import pytest

from dstrain.commands.lists import NEEDS, find_comment, run_command
from dstrain.commands.recipe_args import find_recipe, list_builtin_recipes
from dstrain.config import read_recipe
from tests.vocabulary import invoke


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_every_recipe_says_what_it_needs_and_how_it_runs(name: str) -> None:
    assert find_comment(name, NEEDS)
    rows = [line.split(maxsplit=1) for line in invoke("recipes").output.splitlines() if line.startswith(f"{name} ")]
    assert len(rows) == 2
    assert rows[1][1].startswith(f"dstrain train {name}")


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_the_command_names_all_that_a_recipe_leaves_open(name: str) -> None:
    """With it model and data are named, so that only files are missing."""
    sets = shlex.split(run_command(name))[4::2]
    config = read_recipe(find_recipe(name, False), sets).config
    assert config.model.path or config.model.config or config.task == "protein"
    assert config.data.train or config.task == "temporal"


def test_a_ready_recipe_needs_no_option() -> None:
    assert run_command("demo-rm") == "dstrain train demo-rm"
    assert run_command("docqa") == "dstrain train docqa --set model.path=MODEL --set data.train=FILE"
