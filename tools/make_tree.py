"""Write docs/modules.md, the tree of modules with one line for each: `python tools/make_tree.py`."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dstrain"
PAGE = ROOT / "docs" / "modules.md"
WIDTH = 120
NAME_WIDTH = 32
"""Column in which a description begins; wider names push it to the right."""


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, without its period; empty if there is none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".")


def format_entry(name: str, depth: int, description: str) -> str:
    """Return the lines of an entry of the tree, WIDTH characters wide."""
    name = "  " * depth + name
    column = max(NAME_WIDTH, len(name) + 1)
    lines = textwrap.wrap(description, WIDTH - column) or [""]
    return "\n".join([f"{name:{column}}{lines[0]}".rstrip(), *(" " * column + line for line in lines[1:])])


def iter_entries(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield the line of a package, of its modules, and of its packages in turn."""
    init = folder / "__init__.py"
    yield format_entry(f"{folder.name}/", depth, first_line(init))
    for module in sorted(folder.glob("*.py")):
        if module != init:
            yield format_entry(module.name, depth + 1, first_line(module))
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from iter_entries(package, depth + 1)


def render_page() -> str:
    """Return the page with the tree of dstrain."""
    tree = "\n".join(iter_entries(PACKAGE))
    return f"# Modules\n\nWritten by `python tools/make_tree.py` from the first lines of the modules.\n\n```text\n{tree}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
