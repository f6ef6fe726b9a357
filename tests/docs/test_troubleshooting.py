"""docs/troubleshooting.md quotes messages that dstrain has."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.workers import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.M)
GAP = "\0"
"""Stands for a value that a message holds."""
NAMED_BY_PYTHON = {"SIGABRT", "SIGKILL"}
"""Words of messages that are names of the standard library."""


def render(node: ast.JoinedStr | ast.Constant) -> str:
    """Return a string of the source, with a gap for each value in it."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{\w+(:[^}]*)?\}", GAP, str(node.value))  # a template for str.format
    return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)


@cache
def source_texts() -> str:
    """Return all strings of dstrain's source."""
    found = []
    for path in sorted((ROOT / "dstrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.append(render(node))
    return "\n".join(found)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_in_the_source(message: str) -> None:
    parts = [part.strip(" ;:(),") for part in re.split("|".join(["…", *NAMED_BY_PYTHON]), message)]
    constant = [part for part in parts if part]
    assert constant, message
    missing = [part for part in constant if part not in source_texts()]
    assert not missing, f"{message!r}: {missing} in no string of dstrain"


def test_every_kind_of_trouble_is_on_the_page() -> None:
    assert len(MESSAGES) > 30
    for word in ("NCCL", "Ports", "firewall", "Memory", "Hangs", "NaN", "waits for data", "no faster"):
        assert word in PAGE, word
