"""A table fits the terminal, and loses nothing in a narrow one or in a pipe."""

from __future__ import annotations

import shutil
import sys
from os import terminal_size

import pytest

from dstrain.commands.lists import format_table, terminal_width, wrap_note
from tests.vocabulary import invoke

HEADER = ("name", "task", "trains")
ROWS = [("demo-rm", "rm", "a small reward model on made-up questions, in minutes on a CPU"), ("x", "sft", "short")]


def test_without_a_terminal_each_row_is_one_line() -> None:
    assert format_table(HEADER, ROWS, None).splitlines() == [
        "name     task  trains",
        "demo-rm  rm    a small reward model on made-up questions, in minutes on a CPU",
        "x        sft   short",
    ]


def test_the_last_column_is_wrapped_below_itself() -> None:
    assert format_table(HEADER, ROWS, 45).splitlines() == [
        "name     task  trains",
        "demo-rm  rm    a small reward model on",
        "               made-up questions, in minutes",
        "               on a CPU",
        "x        sft   short",
    ]


def test_a_row_becomes_a_paragraph_where_columns_do_not_fit() -> None:
    assert format_table(HEADER, ROWS, 30).splitlines() == [
        "demo-rm",
        "  task: rm",
        "  trains: a small reward model",
        "    on made-up questions, in",
        "    minutes on a CPU",
        "x",
        "  task: sft",
        "  trains: short",
    ]


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
