"""A class of log.sinks is found by import path or file, or refused before the run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import read_recipe
from dstrain.errors import RecipeError, UsageError
from dstrain.report.sinks import MLflowSink
from dstrain.training.sink_classes import check_sinks, find_sink_class
from tests.tiny import tiny_recipe

MINE = """
class Mine:
    def __init__(self, run_dir, recipe): ...
    def write(self, row): ...
    def close(self, exit_code=0): ...

class Mute:
    def write(self, row): ...

class Picky(Mine):
    @staticmethod
    def check():
        from dstrain.errors import UsageError
        raise UsageError("no server")

class Broken(Mine):
    @staticmethod
    def check():
        return 1 / 0

def function(): ...
"""


@pytest.fixture(autouse=True)
def own_sys_path() -> Iterator[None]:
    """The folder of a file that was imported stays in sys.path, and its neighbours in sys.modules."""
    before = [*sys.path]
    yield
    sys.path[:] = before
    sys.modules.pop("mine_sinks", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe and the module mine_sinks."""
    (tmp_path / "mine_sinks.py").write_text(MINE)
    (tmp_path / "bad.py").write_text("raise SystemExit('not me')")
    return tmp_path


@pytest.mark.parametrize("name", ["Mine", "mine.", ".Mine", "mine:Mine", "a b.Mine", "mine.py:", "mine-x.Mine", ""])
def test_a_name_without_module_or_class_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"task": "sft", "log": {"sinks": [name]}}))
    with pytest.raises(RecipeError, match=r"log\.sinks.*must be module\.Class, or FILE\.py:Class"):
        read_recipe(tmp_path / "recipe.yaml")


def test_a_class_is_found_by_import_path_and_by_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_sink_class("dstrain.report.sinks.MLflowSink") is MLflowSink
    assert find_sink_class(f"{folder}/mine_sinks.py:Mine").__name__ == "Mine"
    monkeypatch.syspath_prepend(str(folder))
    assert find_sink_class("mine_sinks.Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("{folder}/mine_sinks.py:Mime", "has no Mime; did you mean 'Mine'"),
        ("{folder}/mine_sinks.py:function", "is a function, not a class"),
        ("{folder}/mine_sinks.py:Mute", "has no method close"),
        ("{folder}/other.py:Mine", "there is no file"),
        ("{folder}/bad.py:Mine", "cannot be imported .SystemExit: not me"),
        ("no_such_module_here.Mine", "cannot be imported .ModuleNotFoundError.*next to the recipe"),
        ("{folder}/mine_sinks.py:Picky", "^no server$"),
        ("{folder}/mine_sinks.py:Broken", r"check\(\) failed .ZeroDivisionError"),
    ],
)
def test_what_is_no_sink_is_refused_before_the_run(name: str, told: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=told):
        check_sinks([name.format(folder=folder)])


def test_a_module_next_to_the_recipe_is_found_where_no_other_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (folder / "json.py").write_text(MINE)
    names = [
        "mine_sinks.Mine",
        "mine_sinks.py:Mine",
        "json.Mine",
        "dstrain.report.sinks.MLflowSink",
        "nowhere.Mine",
        "__main__.Mine",
    ]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe("sft", folder) | {"log": {"sinks": names}}))
    found = resolve_recipe(TrainRequest(recipe=str(folder / "recipe.yaml"))).config.log.sinks
    assert found == [f"{folder}/mine_sinks.py:Mine"] * 2 + names[2:]
