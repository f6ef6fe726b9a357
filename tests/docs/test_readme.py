"""README: its tree of modules is current, and every path that it names exists."""

from __future__ import annotations

import re

from tests.workers import ROOT
from tools.make_tree import PACKAGE, iter_entries, replace_tree

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_is_current() -> None:
    assert replace_tree(README) == README, "run `python tools/make_tree.py`"


def test_the_tree_names_every_module() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sum(line.split()[0].endswith(".py") for line in iter_entries(PACKAGE)) == len(modules)


def test_every_path_in_the_readme_exists() -> None:
    named = re.findall(r"`((?:dstrain|tests|docs|tools|benchmarks|ds_configs|launchers)/[\w./-]+)`", README)
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
