"""Write the tree of modules into README.md, one line for each: `python tools/make_tree.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dstrain"
BEGIN, END = "<!-- tree: python tools/make_tree.py -->\n", "<!-- end of tree -->\n"
WIDTH = 120
NAME_WIDTH = 32
"""Column in which a description begins; wider names push it to the right."""


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, without its period; empty if there is none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".")


def format_entry(name: str, depth: int, description: str) -> str:
    """Return a line of the tree, cut at WIDTH characters."""
    line = f"{'  ' * depth + name:{NAME_WIDTH - 1}} {description}".rstrip()
    return line if len(line) <= WIDTH else line[: WIDTH - 1].rstrip(" ,;:") + "…"


def iter_entries(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield the line of a package, of its modules, and of its packages in turn."""
    init = folder / "__init__.py"
    yield format_entry(f"{folder.name}/", depth, first_line(init))
    for module in sorted(folder.glob("*.py")):
        if module != init:
            yield format_entry(module.name, depth + 1, first_line(module))
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from iter_entries(package, depth + 1)


def render_tree() -> str:
    """Return the tree of dstrain as a code block."""
    return "```text\n" + "\n".join(iter_entries(PACKAGE)) + "\n```\n"


def replace_tree(page: str) -> str:
    """Return a page with the current tree between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"README.md: the lines {BEGIN.strip()!r} and {END.strip()!r} are missing; add them")
    return before + begin + "\n" + render_tree() + "\n" + end + after


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(replace_tree(readme.read_text(encoding="utf-8")), encoding="utf-8")
