"""The documentation is valid: commands and options exist, recipes are valid, links resolve."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from dstrain.cli import main
from dstrain.config import read_recipe
from tests.workers import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "ds_configs" / "README.md",
]
COMMANDS = [
    (page.relative_to(ROOT).as_posix(), line)
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.S)
    for line in block.splitlines()
    if line.startswith("dstrain ")
]
RECIPES = [
    (page.relative_to(ROOT).as_posix(), block)
    for page in PAGES
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.S)
    if re.search(r"^task:", block, flags=re.M)
]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_in_the_docs_exists(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command: click.Command = main
    while isinstance(command, click.Group):
        assert words[0] in command.commands, f"{page}: {line}"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in known, f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_command_that_is_named_exists(page: Path) -> None:
    code_blocks = "".join(re.findall(r"```\w*\n.*?```", page.read_text(), flags=re.S))
    named = re.findall(r"`dstrain ([a-z]+)", page.read_text())
    named += re.findall(r"^dstrain ([a-z]+)", code_blocks, flags=re.M)
    assert set(named) <= set(main.commands), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_script_of_the_repository_exists_or_is_called_one_of_its_time(page: Path) -> None:
    text = " ".join(page.read_text().split())
    scripts = re.findall(r"python -m ((?:benchmarks|tests|tools)(?:\.\w+)+)([^`]*`, a script of that time)?", text)
    paths = [ROOT / name.replace(".", "/") for name, old in scripts if not old]
    assert not [path for path in paths if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()]


@pytest.mark.parametrize(("page", "text"), RECIPES)
def test_a_recipe_in_the_docs_reads_clean(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    assert read_recipe(tmp_path / "recipe.yaml").config.task == yaml.safe_load(text)["task"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), link


@pytest.mark.slow  # docs/test_examples runs the examples
def test_the_task_of_the_docs_trains(tmp_path: Path) -> None:
    words = [("well done", 1), ("thank you", 1), ("go away", 0), ("you fool", 0)] * 8
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in words)
    )
    sets = [
        "data.train=lines.jsonl",
        "steps=6",
        "batch.total=8",
        "log.every=1",
        "optim.lr=0.1",
        "log.tensorboard=false",
    ]
    task = ["--task", str(ROOT / "docs/examples/tiny_task.py"), "--run-dir", "run"]
    command = [sys.executable, "-m", "dstrain", "train", *task, *(word for pair in sets for word in ("--set", pair))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
