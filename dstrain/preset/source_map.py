"""A JSON text and the line each of its keys stands on."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, PresetError

KeyPath = tuple[str, ...]

_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\],]')


@dataclass(frozen=True)
class JsonSourceMap:
    """A JSON object as read: its content, and where each key stands."""

    file: str
    block: dict[str, Any]
    key_lines: dict[KeyPath, int] = field(default_factory=dict)

    def get_location(self, path: KeyPath) -> str:
        """`zero2.json:3 zero_optimization.stage`."""
        line = next(
            (self.key_lines[path[:size]] for size in range(len(path), 0, -1) if path[:size] in self.key_lines), None
        )
        place = self.file if line is None else f"{self.file}:{line}"
        return f"{place} {'.'.join(path)}" if path else place


def read_json(path: Path) -> JsonSourceMap:
    """The JSON object in a file. PresetError for anything else, with line and column."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(Fault(str(path), f"the file cannot be read ({error})", "name a readable JSON file")) from None
    try:
        block = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except json.JSONDecodeError as error:
        place = f"{path.name}:{error.lineno}:{error.colno}"
        mend = "JSON has no comments and no trailing commas, and its strings stand in double quotation marks"
        raise PresetError(Fault(place, f"not valid JSON: {error.msg}", mend)) from None
    except ValueError as error:
        raise PresetError(Fault(path.name, str(error), "write a finite number")) from None
    except RecursionError:
        raise PresetError(Fault(path.name, "the JSON is nested too deeply", "a preset has few levels")) from None
    if not isinstance(block, dict):
        raise PresetError(Fault(path.name, "a preset is a JSON object", 'begin it with { "zero_optimization": ...'))
    lines, repeated = _find_key_lines(text)
    faults = [Fault(f"{path.name}:{line} {name}", why, "keep one of them") for line, name, why in repeated]
    if faults:
        raise PresetError(faults)
    return JsonSourceMap(path.name, block, lines)


def _parse_finite(word: str) -> float:
    number = float(word)
    return _refuse_constant(word) if math.isinf(number) else number


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _find_key_lines(text: str) -> tuple[dict[KeyPath, int], list[tuple[int, str, str]]]:
    """Line of every key of a valid JSON text, and the keys that stand twice in one object."""
    lines: dict[KeyPath, int] = {}
    repeated: list[tuple[int, str, str]] = []
    open_blocks: list[KeyPath] = []  # path of each container around the token, innermost last
    child: KeyPath = ()  # path of the value that comes next
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            open_blocks.append(child)
            child = (*child, "0") if token == "[" else child
        elif token in ("}", "]"):
            child = open_blocks.pop()
        elif token == ",":
            if child[:-1] == open_blocks[-1] and child[-1].isdecimal():  # the next element of a list
                child = (*child[:-1], str(int(child[-1]) + 1))
        elif match[2]:
            child = (*open_blocks[-1], json.loads(match[1]))
            line = text.count("\n", 0, match.start()) + 1
            if child in lines:
                why = f"the key stands twice, here and on line {lines[child]}, and only the last would count"
                repeated.append((line, ".".join(child), why))
            lines[child] = line
    return lines, repeated
