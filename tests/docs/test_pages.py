"""Pages of the documentation: written from the code, wrapped, on the site, and equal in both languages."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from dstrain.commands.recipe_args import RECIPES_DIR
from dstrain.config import read_recipe
from dstrain.config.aliases import find_answer
from tests.docs.test_docs import COMMANDS, PAGES
from tests.workers import ROOT
from tools.make_pages import PAGES as GENERATED

WIDTH = 120
TRANSLATED = {"README.md": "README.zh.md", "docs/quickstart.md": "docs/quickstart.zh.md"}
TAKEN = ("--task", "--set")
PACKAGED = {path.stem for path in RECIPES_DIR.glob("*.yaml")}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def iter_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines outside of code, tables and comments."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("|", "<!--", "![")):
            yield number, line


def code_blocks(text: str) -> list[str]:
    """Return the code blocks of a page, without the generated tree."""
    return re.findall(r"```\w*\n.*?```", text.partition("<!-- tree")[0], flags=re.S)


@pytest.mark.parametrize(("page", "render"), GENERATED.items())
def test_a_page_from_the_code_is_current(page: str, render: Callable[[], str]) -> None:
    assert render() == read(page), "run `make pages`"


def test_every_key_and_option_has_a_help_text() -> None:
    rows = re.findall(r"^\| `[^|]*\|.*$", read("docs/recipe-keys.md").partition("## Names of other")[0], flags=re.M)
    assert len(rows) > 100
    assert not [row for row in rows if row.rstrip().endswith("|  |")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_line_of_prose_is_longer_than_a_screen(page: Path) -> None:
    long = [number for number, line in iter_prose(page.read_text(encoding="utf-8")) if len(line) > WIDTH]
    assert not long, f"lines {long}: wrap them at {WIDTH} characters"


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED.items())
def test_a_translated_page_has_the_same_code_and_numbers(english: str, chinese: str) -> None:
    ours, theirs = (code_blocks(read(page)) for page in (english, chinese))
    assert ours
    assert theirs == ours, "a code block differs: commands, recipes and outputs are the same in both languages"
    sizes = [re.findall(r"[\d.]+ [GM]iB|\d+ \|", read(page).partition("<!-- tree")[0]) for page in (english, chinese)]
    assert sizes[0] == sizes[1], "a figure differs"
    headings = [len(re.findall(r"^## ", read(page), flags=re.M)) for page in (english, chinese)]
    assert headings[0] == headings[1], "a section is missing"


def test_names_of_other_trainers_lead_to_the_same_keys_as_the_errors() -> None:
    table = re.search(r"\| TRL, HF Trainer \|.*?\n\n", read("docs/coming-from.md"), flags=re.S)
    assert table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].strip().splitlines()[2:]]
    assert len(rows) > 25
    for theirs, others, here, _ in rows:
        for name in re.findall(r"`(\w+)`", theirs + others):
            assert here.strip("`") in str(find_answer((name,))), name


def iter_recipes() -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """Yield (page, packaged recipe or None, --task and --set values) of commands that need no file of the reader's."""
    for page, line in COMMANDS:
        words = shlex.split(line, comments=True)[1:]
        if words[0] not in ("train", "prepare", "plan", "bench") or not (words[1] in PACKAGED or "--task" in words):
            continue
        values = [("task=" if key == "--task" else "") + value for key, value in pairwise(words) if key in TAKEN]
        yield page, words[1] if words[1] in PACKAGED else None, tuple(values)


@pytest.mark.parametrize(("page", "recipe", "values"), iter_recipes())
def test_the_recipe_of_a_command_is_valid(page: str, recipe: str | None, values: tuple[str, ...]) -> None:
    assert read_recipe(RECIPES_DIR / f"{recipe}.yaml" if recipe else None, values).config.task, page


def nav_pages(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        values = entry.values() if isinstance(entry, dict) else [entry]
        for value in values:
            yield from nav_pages(value) if isinstance(value, list) else [str(value)]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    text = re.sub(r"!!python/\S+ \{.*\}\}?", "x}", read("mkdocs.yml"))
    named = list(nav_pages(yaml.safe_load(text)["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages)


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed (.[docs])")
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_servers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 30
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\bsrc=[\"']?(https?:[^\"' >]+)|<link[^>]*\bhref=[\"']?(https?:[^\"' >]+)"
    )
    assert not {found for page in pages for found in loads.findall(page)}
    index = json.loads((tmp_path / "site/search/search_index.json").read_text(encoding="utf-8"))
    assert any("gradient_checkpointing" in doc["text"] for doc in index["docs"])


def slugs(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = [line.lstrip("# ") for _, line in iter_prose(page.read_text(encoding="utf-8")) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_an_anchor_of_a_link_is_a_heading(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert anchor in slugs(page.parent / link if link else page), f"{link}#{anchor}"


FRAGMENTS = [
    (page.relative_to(ROOT).as_posix(), block)
    for page in PAGES
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    if not re.search(r"^task:", block, flags=re.M)
]
"""Parts of recipes, which a page shows without the rest."""


@pytest.mark.parametrize(("page", "fragment"), FRAGMENTS)
def test_a_part_of_a_recipe_in_the_docs_is_valid(page: str, fragment: str, tmp_path: Path) -> None:
    rest = "" if "data:" in fragment else "data: {train: train.jsonl}\n"
    (tmp_path / "recipe.yaml").write_text(f"task: sft\n{rest}{fragment}", encoding="utf-8")
    assert read_recipe(tmp_path / "recipe.yaml").config.task == "sft", page


PYTHON = [
    (page.relative_to(ROOT).as_posix(), block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
]


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_what_a_python_block_imports_exists(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert not [name.name for name in node.names if not hasattr(module, name.name)], page
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(name.name) for name in node.names), page
