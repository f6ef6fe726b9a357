"""Turns a public DeepSpeed JSON, with "auto" and learning keys, into a preset, and says what went where."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import Fault
from dstrain.preset import migrate
from dstrain.preset.check import Finding, check, instead_of_auto
from dstrain.preset.key_schema import find, show, whole_numbers
from dstrain.preset.rules import ZERO, check_rules, peek
from dstrain.preset.source_map import KeyPath, Text, read_text

_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(frozen=True)
class Adopted:
    """A foreign JSON made into one of ours."""

    block: dict[str, Any]
    """What is left: memory only. Write `json` to a file."""
    lines: list[str]
    """What went where, one line for each value that was moved, renamed or dropped."""
    faults: list[Fault]
    """What a person must decide; empty where the JSON reads clean."""
    recipe: dict[str, Any]
    """The learning it held, as recipe keys: `{"optim.lr": 2e-05}`."""

    @property
    def json(self) -> str:
        """The file's text."""
        return json.dumps(self.block, indent=2) + "\n"


def adopt(path: str | Path) -> Adopted:
    """The preset hidden in a public DeepSpeed JSON. PresetError where the file is no JSON object."""
    return adopt_text(read_text(Path(path)))


def adopt_text(text: Text) -> Adopted:
    """As adopt, of a text already read."""
    block, lines = copy.deepcopy(text.block), []
    recipe: dict[str, Any] = {}
    if isinstance(block.get(ZERO), bool):
        lines.append(f'{ZERO} {show(block[ZERO])} -> {{"stage": {int(block[ZERO])}}}')
        block[ZERO] = {"stage": int(block[ZERO])}
    while findings := _droppable(block):
        for finding in findings:
            value = _cut(block, finding.path)
            lines += _said(block, finding, value)
            if finding.kind == "learning":
                recipe |= {m.recipe: m.becomes for m in migrate.moves(finding.path[0], value) if m.recipe}
    left = [Fault(text.where(f.path), f.problem, f.mend) for f in check(block) + check_rules(block)]
    return Adopted(whole_numbers(block), lines, left, recipe)


def _droppable(block: dict[str, Any]) -> list[Finding]:
    """What needs no decision: one finding for each key."""
    findings = [finding for finding in check(block) + check_rules(block) if finding.kind not in ("type", "clash")]
    return list({finding.path: finding for finding in reversed(findings)}.values())[::-1]


def _said(block: dict[str, Any], finding: Finding, value: Any) -> list[str]:
    """The lines that say where a value went; a renamed one is put back under its new name."""
    dotted = ".".join(finding.path)
    if finding.kind == "learning":
        return [str(move) for move in migrate.moves(dotted, value)]
    if finding.kind == "auto":
        return [f'"auto" at {dotted} -> dropped, {instead_of_auto(finding.path, find(finding.path) or {})}']
    if finding.kind == "renamed":
        return [_rename(block, finding.path, value)]
    why = finding.problem if finding.kind != "unknown" else f"{finding.problem} ({finding.mend})"
    return [f"{dotted} {show(value)} -> dropped, {why}"]


def _rename(block: dict[str, Any], path: KeyPath, value: Any) -> str:
    """Writes a value under the name DeepSpeed documents, unless that name has a value already."""
    key, home = find(path) or {}, peek(block, *path[:-1], default=None) if len(path) > 1 else block
    dotted, name = f"{'.'.join(path)} {show(value)}", str(key.get("deprecated"))
    if path[-1] in _OFFLOADS:
        name, value = _OFFLOADS[path[-1]], {"device": "cpu"} if value is True else None
    if value is None or find((*path[:-1], name)) is None:
        return f"{dotted} -> dropped, it asks for nothing"
    if home is None:
        home = block[path[0]] = {}
    if name in home:
        return f"{dotted} -> dropped, `{name}` says it"
    home[name] = value
    return f"{dotted} -> {'.'.join((*path[:-1], name))} {show(value)}"


def _cut(block: dict[str, Any], path: KeyPath) -> Any:
    """Takes the value at a path out, and the blocks that are empty without it."""
    if len(path) == 1:
        return block.pop(path[0])
    value = _cut(block[path[0]], path[1:])
    if not block[path[0]]:
        del block[path[0]]
    return value
