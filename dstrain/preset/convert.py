"""Turns a public DeepSpeed JSON, with "auto" and learning keys, into a preset, and says what went where."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import Fault
from dstrain.preset import migrate
from dstrain.preset.check import Issue, check_schema, describe_auto_default
from dstrain.preset.key_schema import KeyPath, cast_integers, find_key, format_json
from dstrain.preset.read_json import read_json
from dstrain.preset.rules import ZERO_BLOCK, check_conflicts, get_nested
from dstrain.source_map import SourceMap

_DEPRECATED_OFFLOAD_KEYS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(frozen=True)
class ConvertedPreset:
    """A foreign JSON made into one of ours."""

    block: dict[str, Any]
    """What is left: memory only. Write `json` to a file."""
    messages: list[str]
    """What went where, one line for each value that was moved, renamed or dropped."""
    faults: list[Fault]
    """What a person must decide; empty where the JSON reads clean."""
    recipe_values: dict[str, Any]
    """The learning it held, as recipe keys: `{"optim.lr": 2e-05}`."""

    @property
    def json_text(self) -> str:
        """The file's text."""
        return json.dumps(self.block, indent=2) + "\n"


def convert_preset(path: str | Path) -> ConvertedPreset:
    """The preset hidden in a public DeepSpeed JSON. PresetError where the file is no JSON object."""
    return convert_source(read_json(Path(path)))


def convert_source(source: SourceMap) -> ConvertedPreset:
    """As adopt, of a text already read."""
    block, lines = copy.deepcopy(source.values), []
    recipe: dict[str, Any] = {}
    if isinstance(block.get(ZERO_BLOCK), bool):
        lines.append(f'{ZERO_BLOCK} {format_json(block[ZERO_BLOCK])} -> {{"stage": {int(block[ZERO_BLOCK])}}}')
        block[ZERO_BLOCK] = {"stage": int(block[ZERO_BLOCK])}
    while findings := _removable_issues(block):
        for finding in findings:
            value = _pop_path(block, finding.path)
            lines += _convert_value(block, finding, value)
            if finding.kind == "learning":
                recipe |= {
                    m.recipe_key: m.recipe_value for m in migrate.convert_key(finding.path[0], value) if m.recipe_key
                }
    left = [Fault(source.get_location(f.path), f.problem, f.fix) for f in check_schema(block) + check_conflicts(block)]
    return ConvertedPreset(cast_integers(block), lines, left, recipe)


def _removable_issues(block: dict[str, Any]) -> list[Issue]:
    """What needs no decision: one finding for each key."""
    findings = [
        finding for finding in check_schema(block) + check_conflicts(block) if finding.kind not in ("type", "clash")
    ]
    return list({finding.path: finding for finding in reversed(findings)}.values())[::-1]


def _convert_value(block: dict[str, Any], issue: Issue, value: Any) -> list[str]:
    """The lines that say where a value went; a renamed one is put back under its new name."""
    dotted = ".".join(issue.path)
    if issue.kind == "learning":
        return [str(move) for move in migrate.convert_key(dotted, value)]
    if issue.kind == "auto":
        return [f'"auto" at {dotted} -> dropped, {describe_auto_default(issue.path, find_key(issue.path) or {})}']
    if issue.kind == "renamed":
        return [_rename_key(block, issue.path, value)]
    why = issue.problem if issue.kind != "unknown" else f"{issue.problem} ({issue.fix})"
    return [f"{dotted} {format_json(value)} -> dropped, {why}"]


def _rename_key(block: dict[str, Any], path: KeyPath, value: Any) -> str:
    """Writes a value under the name DeepSpeed documents, unless that name has a value already."""
    key, home = find_key(path) or {}, get_nested(block, *path[:-1], default=None) if len(path) > 1 else block
    dotted, name = f"{'.'.join(path)} {format_json(value)}", str(key.get("deprecated"))
    if path[-1] in _DEPRECATED_OFFLOAD_KEYS:
        name, value = _DEPRECATED_OFFLOAD_KEYS[path[-1]], {"device": "cpu"} if value is True else None
    if value is None or find_key((*path[:-1], name)) is None:
        return f"{dotted} -> dropped, it asks for nothing"
    if home is None:
        home = block[path[0]] = {}
    if name in home:
        return f"{dotted} -> dropped, `{name}` says it"
    home[name] = value
    return f"{dotted} -> {'.'.join((*path[:-1], name))} {format_json(value)}"


def _pop_path(block: dict[str, Any], path: KeyPath) -> Any:
    """Takes the value at a path out, and the blocks that are empty without it."""
    if len(path) == 1:
        return block.pop(path[0])
    value = _pop_path(block[path[0]], path[1:])
    if not block[path[0]]:
        del block[path[0]]
    return value
