"""The starter recipe: its images fit."""

from __future__ import annotations

import math
from typing import Any

import yaml

from dstrain.commands.init import render_recipe_template
from dstrain.commands.recipe_args import find_recipe


def page_tokens(dpi: int) -> int:
    """Return the tokens of an A4 page in Qwen2.5-VL: 28 x 28 pixels are one."""
    return math.ceil(8.27 * dpi / 28) * math.ceil(11.69 * dpi / 28)


def fits(recipe: dict[str, Any]) -> bool:
    """Return True where all pages of a question and 500 tokens of text fit."""
    options = recipe["options"]
    return recipe["data"]["max_length"] >= options["max_pages"] * page_tokens(options["dpi"]) + 500


def test_the_pages_of_a_question_fit_into_its_length() -> None:
    path = find_recipe("docqa", False)
    assert path is not None
    assert fits(yaml.safe_load(path.read_text()))
    assert fits(yaml.safe_load(render_recipe_template("docqa")))


def test_a_photo_fits_into_the_length_of_a_conversation() -> None:
    assert yaml.safe_load(render_recipe_template("vlm"))["data"]["max_length"] > math.ceil(1024 / 28) ** 2
    assert yaml.safe_load(render_recipe_template("sft"))["data"]["max_length"] == 1024
