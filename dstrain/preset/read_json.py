"""JSON files as a SourceMap: the object and the line of each of its keys."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, PresetError
from dstrain.files import not_file_reason
from dstrain.source_map import SourceMap

_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\],]')


def read_json(path: Path) -> SourceMap:
    """Read the JSON object in a file. Raises PresetError, with line and column, for anything else."""
    try:
        if reason := not_file_reason(path):
            raise PresetError(f"{path}: {reason}; save the JSON as a file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(Fault(str(path), f"the file cannot be read ({error})", "name a readable JSON file")) from None
    try:
        values = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite)
    except json.JSONDecodeError as error:
        place = f"{path.name}:{error.lineno}:{error.colno}"
        fix = "JSON allows no comments and no trailing commas, and strings need double quotation marks"
        raise PresetError(Fault(place, f"not valid JSON: {error.msg}", fix)) from None
    except ValueError as error:
        raise PresetError(Fault(path.name, str(error), "write a finite number")) from None
    except RecursionError:
        raise PresetError(Fault(path.name, "the JSON is nested too deeply", "a preset has few levels")) from None
    if not isinstance(values, dict):
        raise PresetError(Fault(path.name, "a preset is a JSON object", 'begin it with { "zero_optimization": ...'))
    lines, repeated = _find_key_lines(text)
    if repeated:
        raise PresetError(Fault(f"{path.name}:{line} {name}", why, "keep one of them") for line, name, why in repeated)
    return SourceMap(path.name, values, {key: f"{path.name}:{line}" for key, line in lines.items()})


def _parse_finite(word: str) -> float:
    number = float(word)
    return _reject_constant(word) if math.isinf(number) else number  # 1e999 is JSON, but inf as a float


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _find_key_lines(text: str) -> tuple[dict[tuple[str, ...], int], list[tuple[int, str, str]]]:
    """Return the line of every key of a valid JSON text, and (line, key, problem) of keys repeated in one object."""
    lines: dict[tuple[str, ...], int] = {}
    repeated: list[tuple[int, str, str]] = []
    open_blocks: list[tuple[str, ...]] = []  # path of each container around the token, innermost last
    child: tuple[str, ...] = ()  # path of the value that comes next
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
            # The json module has no positions of keys, so the text is scanned a second time.
            line = text.count("\n", 0, match.start()) + 1
            if child in lines:
                why = f"the key is repeated, here and on line {lines[child]}, and only the last would count"
                repeated.append((line, ".".join(child), why))
            lines[child] = line
    return lines, repeated
