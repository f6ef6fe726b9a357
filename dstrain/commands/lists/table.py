"""Tables for a terminal of any width."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = 2
MIN_TEXT_WIDTH = 24
"""Narrowest column that text is wrapped into; below it a row becomes a paragraph."""


def terminal_width() -> int | None:
    """Return the columns of the terminal; None where the output goes to a file or a pipe, which has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return rows with aligned columns, the last of which is wrapped to the width.

    Without a width each row is one line. Where the width is too small for the other columns, each row is a paragraph.
    """
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    fixed = sum(widths[:-1]) + GAP * (len(header) - 1)
    if width is not None and width - fixed < min(MIN_TEXT_WIDTH, widths[-1]):
        return "\n".join(_paragraph(header, row, width) for row in rows)
    left = None if width is None else width - fixed
    return "\n".join(line for row in table for line in _lines(row, widths, left))


def wrap_note(text: str, width: int | None) -> str:
    """Return the lines of a text wrapped to the width; unchanged without one."""
    if width is None:
        return text
    return "\n".join(textwrap.fill(line, max(width, 12), break_on_hyphens=False) for line in text.splitlines())


def _lines(row: Sequence[str], widths: Sequence[int], left: int | None) -> list[str]:
    cells = [f"{cell:{size}}{'':{GAP}}" for cell, size in zip(row[:-1], widths[:-1], strict=True)]
    indent = "".join(cells)
    if left is None:
        return [(indent + row[-1]).rstrip()]
    texts = textwrap.wrap(row[-1], left, break_on_hyphens=False) or [""]
    return [(f"{indent if index == 0 else ' ' * len(indent)}{text}").rstrip() for index, text in enumerate(texts)]


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    """Return the first cell as a title, and each other below it with the name of its column."""
    lines = [row[0]]
    for name, cell in zip(header[1:], row[1:], strict=True):
        text = f"{name}: {cell}"
        lines += textwrap.wrap(
            text, max(width, 12), initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)
