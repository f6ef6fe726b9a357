"""Conversion of a public DeepSpeed JSON into a preset."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, SourceMap, lookup
from dstrain.preset import keys
from dstrain.preset.check import ZERO_BLOCK, Issue, describe_auto_default, find_issues, read_json
from dstrain.preset.keys import KeyPath, cast_integers, find_key, format_json

_DEPRECATED_OFFLOAD_KEYS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(frozen=True)
class ConvertedPreset:
    """Result of converting a public DeepSpeed JSON."""

    block: dict[str, Any]
    """The preset: memory settings only."""
    messages: list[str]
    """A line for each value that was moved, renamed or dropped."""
    faults: list[Fault]
    """Problems that the user must decide; empty for a clean conversion."""
    recipe_values: dict[str, Any]
    """Training settings of the JSON, as recipe keys: `{"optim.lr": 2e-05}`."""

    @property
    def json_text(self) -> str:
        """Return the text of the preset's file."""
        return json.dumps(self.block, indent=2) + "\n"


def convert_preset(path: str | Path) -> ConvertedPreset:
    """Convert a public DeepSpeed JSON, with "auto" and training keys. Raises PresetError for an invalid file."""
    return convert_source(read_json(Path(path)))


def convert_source(source: SourceMap) -> ConvertedPreset:
    """Convert a JSON that was already read."""
    block, lines = copy.deepcopy(source.values), []
    recipe: dict[str, Any] = {}
    if isinstance(block.get(ZERO_BLOCK), bool):
        lines.append(f'{ZERO_BLOCK} {format_json(block[ZERO_BLOCK])} -> {{"stage": {int(block[ZERO_BLOCK])}}}')
        block[ZERO_BLOCK] = {"stage": int(block[ZERO_BLOCK])}
    while issues := _removable_issues(block):  # again, because removing one key can cause an issue of another
        for issue in issues:
            value = _pop_path(block, issue.path)
            lines += _convert_value(block, issue, value)
            if issue.kind == "learning":
                converted = keys.convert_key(issue.path[0], value)
                recipe |= {key.recipe_key: key.recipe_value for key in converted if key.recipe_key}
    left = [Fault(source.get_location(f.path), f.problem, f.fix) for f in find_issues(block)]
    return ConvertedPreset(cast_integers(block), lines, left, recipe)


def _removable_issues(block: dict[str, Any]) -> list[Issue]:
    """Return the issues that need no decision of the user, the first of each key."""
    issues = [issue for issue in find_issues(block) if issue.kind not in ("type", "clash")]
    return list({issue.path: issue for issue in reversed(issues)}.values())[::-1]


def _convert_value(block: dict[str, Any], issue: Issue, value: Any) -> list[str]:
    """Return the messages about a removed value; a renamed key is written back under its new name."""
    dotted = ".".join(issue.path)
    if issue.kind == "learning":
        return [str(key) for key in keys.convert_key(dotted, value)]
    if issue.kind == "auto":
        return [f'"auto" at {dotted} -> dropped, {describe_auto_default(issue.path, find_key(issue.path) or {})}']
    if issue.kind == "renamed":
        return [_rename_key(block, issue.path, value)]
    why = issue.problem if issue.kind != "unknown" else f"{issue.problem} ({issue.fix})"
    return [f"{dotted} {format_json(value)} -> dropped, {why}"]


def _rename_key(block: dict[str, Any], path: KeyPath, value: Any) -> str:
    """Write a value under the name that DeepSpeed documents, unless that key is set already."""
    key, home = find_key(path) or {}, lookup(block, path[:-1])
    dotted, name = f"{'.'.join(path)} {format_json(value)}", str(key.get("deprecated"))
    if path[-1] in _DEPRECATED_OFFLOAD_KEYS:
        name, value = _DEPRECATED_OFFLOAD_KEYS[path[-1]], {"device": "cpu"} if value is True else None
    if value is None or find_key((*path[:-1], name)) is None:
        return f"{dotted} -> dropped, it has no effect"
    if home is None:
        home = block[path[0]] = {}
    if name in home:
        return f"{dotted} -> dropped, `{name}` is set already"
    home[name] = value
    return f"{dotted} -> {'.'.join((*path[:-1], name))} {format_json(value)}"


def _pop_path(block: dict[str, Any], path: KeyPath) -> Any:
    """Remove the value at a path, and blocks that become empty, and return the value."""
    if len(path) == 1:
        return block.pop(path[0])
    value = _pop_path(block[path[0]], path[1:])
    if not block[path[0]]:
        del block[path[0]]
    return value
