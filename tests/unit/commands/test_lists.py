"""A table fits the terminal, and loses nothing in a narrow one or in a pipe."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from os import terminal_size

import pytest

from dstrain.commands.lists import NEEDS, find_comment, format_table, list_tasks, run_command, terminal_width, wrap_note
from dstrain.commands.recipe_args import find_recipe, list_builtin_recipes
from dstrain.config import read_recipe
from dstrain.preset import preset_names
from dstrain.units import format_bytes
from tests.vocabulary import invoke

HEADER = ("name", "task", "trains")
ROWS = [("demo-rm", "rm", "a small reward model on made-up questions, in minutes on a CPU"), ("x", "sft", "short")]


@pytest.mark.parametrize(("width", "lines"), [(None, 3), (45, 5), (30, 8)])
def test_a_table_fits_the_width_and_loses_no_word(width: int | None, lines: int) -> None:
    """Without a terminal each row is one line; the last column is wrapped; a row of 30 columns becomes a paragraph."""
    found = format_table(HEADER, ROWS, width).splitlines()
    assert len(found) == lines
    assert all(len(line) <= (width or 1000) for line in found)
    for row in ROWS:
        assert set(" ".join(row).split()) <= set(" ".join(found).split())


def test_a_note_is_wrapped_line_by_line() -> None:
    assert wrap_note("one two three\nfour", 13) == "one two three\nfour"
    assert wrap_note("one two three four", 13) == "one two three\nfour"
    assert wrap_note("one two three four", None) == "one two three four"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("command", ["recipes", "presets", "tasks"])
def test_lists_fit_a_terminal_of_any_width(command: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.commands.lists.terminal_width", lambda: width)
    lines = invoke(command).output.splitlines()
    # A command cannot be wrapped: it is there to be copied.
    long = [line for line in lines if len(line) > width and len(line.split()) > 1 and "--set" not in line]
    assert not long


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: terminal_size((77, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal_width() == 77
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal_width() is None


# The list of recipes says what each needs and how to run it.


def test_a_task_lists_the_metrics_that_a_recipe_may_name() -> None:
    assert "eval.metric: loss, accuracy, margin" in list_tasks("rm")


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_every_recipe_says_what_it_needs_and_how_it_runs(name: str) -> None:
    assert find_comment(name, NEEDS)
    rows = [line.split(maxsplit=1) for line in invoke("recipes").output.splitlines() if line.startswith(f"{name} ")]
    assert len(rows) == 2
    assert rows[1][1].startswith(f"dstrain train {name}")


FILLED = r" +(path|train|harmless_rm|helpful_rm): "
"""Lines of the keys that `run_command` sets."""


@pytest.mark.parametrize("name", list_builtin_recipes())
def test_the_command_names_all_that_a_recipe_leaves_open(name: str) -> None:
    """With it model and data are named, so that only files are missing."""
    sets = shlex.split(run_command(name))[4::2]
    config = read_recipe(find_recipe(name, False), sets).config
    assert config.model.path or config.model.config or config.task == "protein"
    assert config.data.train or config.task == "temporal"
    assert "FILL IN" not in "".join(
        line for line in invoke("recipes", name).output.splitlines() if not re.match(FILLED, line)
    )


def test_a_ready_recipe_needs_no_option() -> None:
    assert run_command("demo-rm") == "dstrain train demo-rm"
    assert "options.safety.helpful_rm=FOLDER" in run_command("safe-mm-dpo")
    assert run_command("docqa") == "dstrain train docqa --set model.path=MODEL --set data.train=FILE"


# The list of presets shows the plan's memory of a known model.


def test_the_memory_in_the_list_is_that_of_the_plan() -> None:
    words = ["plan", "--task", "sft", "--set", "data.train=[]", "--set", "batch={micro: 1, accumulate: 1}", "--json"]
    words += ["--model-shape", "qwen3-8b", "--gpu-memory", "80GiB", "--gpus", "8"]
    planned = {row["preset"]: row["gpu_bytes"] for row in json.loads(invoke(*words).output)["presets"]}
    lines = invoke("presets").output.splitlines()
    assert lines[0].split("  ")[-2].strip() == "8B full, 8 GPUs"
    for name, line in zip(preset_names(), lines[1:], strict=False):
        assert format_bytes(planned[name]) in line, name
