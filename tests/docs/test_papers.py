"""docs/papers.md names the paper of every formula, the file that computes it, and keys that exist."""

from __future__ import annotations

import re
from functools import cache

import pytest

from dstrain.commands.recipe_args import RECIPES_DIR
from dstrain.config import read_recipe
from dstrain.tasks import builtin_tasks, find_task, task_options
from tests.workers import ROOT

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
FOLDERS = ("dstrain", "ds_configs")


@cache
def option_names() -> set[str]:
    """Return the dotted names of the options of all packaged tasks."""
    options = [option for name in builtin_tasks() for option in task_options(find_task(name))]
    return {f"options.{one.name}" for one in options} | {
        f"options.{one.name}.{nested.name}" for one in options for nested in one.nested
    }


def test_every_paper_that_the_code_cites_is_on_the_page() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".json")]
    cited = {number for path in files for number in ARXIV.findall(path.read_text(encoding="utf-8"))}
    assert not cited - set(ARXIV.findall(PAGE))


def test_every_file_and_name_in_the_code_column_exists() -> None:
    for row in ROWS:
        if row[0] == "paper":
            continue
        path = ROOT
        for word in re.findall(r"`([^`]+)`", row[2]):
            if "/" in word:
                path = ROOT / word
                assert path.exists(), word
            elif word.endswith((".py", ".yaml")):
                path = path.parent / word
                assert path.exists(), word
            elif path.is_file():
                assert re.search(rf"\b{word}\b", path.read_text(encoding="utf-8")), f"{word} in {path}"


@pytest.mark.parametrize(
    "setting", sorted({word for row in ROWS for word in re.findall(r"`((?:\w+\.)[\w.]+(?:: [^`]+)?)`", row[3])})
)
def test_a_setting_of_the_page_exists(setting: str) -> None:
    key, _, value = setting.partition(": ")
    if key.startswith("options."):
        assert key in option_names()
        return
    if value:
        extra = ["model.lora={}"] if key == "model.quantize" else []
        assert read_recipe(RECIPES_DIR / "demo-rm.yaml", [f"{key}={value}", *extra])
    else:
        page = (ROOT / "docs/recipe-keys.md").read_text(encoding="utf-8")
        block, _, name = key.rpartition(".")
        assert f"| `{name}` |" in page.partition(f"## `{block}`\n")[2].partition("\n## ")[0]
