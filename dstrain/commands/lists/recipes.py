"""dstrain recipes: the packaged recipes, or one in full."""

from __future__ import annotations

import re
import shlex

import yaml

from dstrain.commands.lists.table import format_table, terminal_width, wrap_note
from dstrain.commands.recipe.find_recipe import RECIPES_DIR, list_builtin_recipes
from dstrain.errors import UsageError, suggest_name

NEEDS = "# Needs: "
"""Begins the line of a packaged recipe on its hardware, model and data."""
FILL_IN = re.compile(r"^ +(?P<key>path|train): .*# FILL IN", re.MULTILINE)
"""Lines of keys that a recipe leaves to the user."""
STAND_INS = {"path": "model.path=MODEL", "train": "data.train=FILE"}
_RECIPES_NOTE = "`dstrain recipes NAME > mine.yaml` gives you a copy to edit."


def list_recipes(name: str | None) -> str:
    """Return a table of the packaged recipes, or one in full. Raises UsageError."""
    names = list_builtin_recipes()
    if name is not None:
        if name not in names:
            raise UsageError(f"recipe '{name}': there is no such recipe; {suggest_name(name, names)}")
        return _read(name).rstrip()
    rows = [(recipe, _task(recipe), find_comment(recipe, NEEDS), _summarize_recipe(recipe)) for recipe in names]
    width = terminal_width()
    table = format_table(("recipe", "task", "needs", "trains"), rows, width)
    runs = format_table(("recipe", "run"), [(recipe, run_command(recipe)) for recipe in names], width)
    return f"{table}\n\n{runs}\n\n{wrap_note(_RECIPES_NOTE, width)}"


def _read(name: str) -> str:
    return (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8")


def find_comment(name: str, begin: str) -> str:
    """Return the rest of the first comment line of a recipe that begins so; empty if there is none."""
    return next((line.removeprefix(begin) for line in _read(name).splitlines() if line.startswith(begin)), "")


def _summarize_recipe(name: str) -> str:
    return _read(name).splitlines()[0].removeprefix("#").strip()


def _task(name: str) -> str:
    return str(yaml.safe_load(_read(name))["task"])


def run_command(name: str) -> str:
    """Return the command that trains a recipe, with --set for what it leaves to the user."""
    keys = [found["key"] for found in FILL_IN.finditer(_read(name))]
    words = ["dstrain", "train", name, *(word for key in keys for word in ("--set", STAND_INS[key]))]
    return shlex.join(words)
