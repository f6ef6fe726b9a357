"""The rows of init_from.yaml, applied to the keys of another trainer."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dstrain.commands.init import to_yaml
from dstrain.commands.init_prompts import CHATML
from dstrain.commands.init_scripts import SHELL_VALUE
from dstrain.config.aliases import find_answer, find_names, find_value, read_table
from dstrain.errors import Fault, KeyPath, RecipeError, SourceMap, dotted_name, one_line
from dstrain.files import parse_json
from dstrain.report.run_history import is_number
from dstrain.tasks import find_task

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Conversion:
    """What is known of their file and of the recipe, and the rows of init_from.yaml applied to them."""

    path: Path
    source: SourceMap
    task: str | None
    """The user's word, or what the file says."""
    trainer: str
    values: dict[KeyPath, Any] = field(default_factory=dict)
    """Recipe key -> value."""
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """Recipe key -> their key, with `(default)` where the file leaves it out."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Why keys are not in the recipe -> their names."""
    to_fill_in: dict[KeyPath, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Their keys of which the user is told on the terminal."""
    places: dict[str, KeyPath] = field(default_factory=dict)
    """Their keys without blocks -> with them."""
    theirs: dict[str, Any] = field(default_factory=dict)
    """Their keys without blocks that are set -> values."""
    defaults: dict[str, Any] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    """Their keys that are not in the recipe or the notes yet."""
    has_images: bool = False

    # The rows of init_from.yaml

    def apply(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if not self.holds(row.get("when"), "", None):
                continue
            if "of" in row and "keys" not in row:
                origin = self.origins.get(_to_path(row["of"]))
                if origin is not None:
                    self._apply_case(row, origin.partition(";")[0], None)
            elif "each" in row:
                for name in self.expand(row["each"]):
                    if name in (self.theirs if row.get("peek") else self.left):
                        self._apply_cases(row, *self._read((name,), row))
            else:
                self._apply_cases(row, *self._read(self.expand(row["keys"]), row))

    def _read(self, names: Sequence[str], row: Mapping[str, Any]) -> tuple[str, Any]:
        """Return the key of a row that is set, and its value."""
        transformation = row.get("as")
        if isinstance(transformation, dict) and "join" in transformation:
            values = {name: to_number(value) for name, value in (self.take(name) for name in names) if name}
            parts = transformation["join"]
            joined = [values.get(name, default) for name, default in parts.items()]
            return next(iter(values), ""), joined
        if row.get("any of"):
            given = {name: self.take(name)[1] for name in names if name in self.theirs}
            is_true = [name for name, value in given.items() if value is True]
            return ", ".join(is_true or given), bool(is_true)
        if row.get("peek"):
            is_set = [name for name in names if name in self.theirs and self.theirs[name] is not SHELL_VALUE]
            name = (is_set or [name for name in names if name in self.defaults] or [""])[0]
            value = self.theirs.get(name, self.defaults.get(name))
        else:
            name, value = self.take(*names)
        return name, self._transform(transformation, name, value)

    def _apply_cases(self, row: Mapping[str, Any], name: str, value: Any) -> None:
        if not name:
            case = row.get("absent")
            if case is not None and self.holds(case.get("if"), name, value):
                self._apply_case(case, name, value)
            return
        for case in row.get("cases", [row]):
            if self.holds(case.get("if"), name, value):
                return self._apply_case(case, name, self._transform(case.get("as"), name, value, "cases" in row))

    def _apply_case(self, case: Mapping[str, Any], name: str, value: Any) -> None:
        """Set a recipe key, note why there is none, refuse the value, or leave the key to the user."""
        of = _to_path(case.get("of", case.get("to", "")))
        words = {
            "name": name, "value": one_line(str(value)), "trainer": self.trainer, "task": self.task,
            "origin": self.origins.get(of, ""), "too long": read_table()["trainers"][self.trainer]["too_long"],
        }  # fmt: skip

        def fill(text: str) -> str:
            return re.sub(r"\{([a-z ]+)\}", lambda match: str(words[match[1]]), text)

        if "refuse" in case:
            raise self.refuse(name, case["refuse"])
        if "to each" in case:
            for key, item in value.items():
                self.put((*_to_path(case["to each"]), str(key)), item, name)
        elif "fill in" in case:
            self.to_fill_in[of] = fill(case["fill in"])
        elif "append" in case:
            origin = fill(case.get("origin", name))
            origins = self.origins.get(of, "").split("; ") if of in self.origins else []
            self.values[of] = [*self.values.get(of, []), case["append"]]
            self.origins[of] = "; ".join(dict.fromkeys([*origins, origin]))
        elif "to" in case:
            new = _CONSTANTS[case["named value"]] if "named value" in case else case.get("value", value)
            if new is not None or "value" in case:
                if case.get("override"):
                    self.values.pop(of, None)
                self.put(of, copy.deepcopy(new), name)
                if "origin" in case:
                    self.origins[of] = fill(case["origin"])
        if "note" in case:
            self.note(case.get("name", name), fill(case["note"]), is_lost=not case.get("quiet"))

    def holds(self, conditions: Mapping[str, Any] | None, name: str, value: Any) -> bool:
        """Return whether all conditions hold."""
        return all(_CONDITIONS[kind](self, name, value, wanted) for kind, wanted in (conditions or {}).items())

    def _transform(self, transformation: Any, name: str, value: Any, is_wanted: bool = True) -> Any:
        """Return the value by a transformation of a row or a case."""
        if transformation is None or not name or not is_wanted:
            return value
        kind, argument = transformation, None
        if isinstance(transformation, dict):
            kind, argument = next(iter(transformation.items()))
        made = _TRANSFORMATIONS[kind](self, name, value, argument)
        if isinstance(transformation, dict) and "least" in transformation:
            made = max(made, transformation["least"])
        return made

    def expand(self, names: str | Sequence[str]) -> list[str]:
        """Return the names; in place of `@KEY` those of that answer, of `@KEY*` those left of all that begin so."""
        expanded: list[str] = []
        for name in [names] if isinstance(names, str) else names:
            if name == "@model.lora*":
                expanded += [left for left in self.left if left == "r" or _answer_text(left).startswith("model.lora")]
            elif name.startswith("@"):
                expanded += find_names(name[1:])
            else:
                expanded.append(name)
        return expanded

    def is_any(self, names: Sequence[str], values: Iterable[Any], *, as_words: bool = False) -> bool:
        """Return whether one of their keys has one of the values; `as_words`: as one of the words of a text."""
        wanted = {_normalize(value) for value in values}
        for name in self.expand(names):
            if name in self.theirs:
                given = _normalize(self.theirs[name])
                if wanted & ({*re.findall(r"\w+", given)} if as_words else {given}):
                    return True
        return False

    # Bookkeeping

    def take(self, *names: str) -> tuple[str, Any]:
        """Return the one of these names of a key that is set, and its value or the trainer's default.

        They are not left for `_convert_by_answer`. Raises RecipeError for two of them with different values.
        """
        found = [name for name in names if name in self.theirs and self.theirs[name] is not SHELL_VALUE]
        for name in names:
            self.left.pop(name, None)
        for name in found[1:]:
            if self.theirs[name] != self.theirs[found[0]]:
                problem = f"is {to_yaml(self.theirs[name])}"
                raise self.conflict(self.locate(name), problem, found[0], self.theirs[found[0]])
        name = (found or [name for name in names if name in self.defaults] or [""])[0]
        return name, self.theirs.get(name, self.defaults.get(name))

    def put(self, key: str | KeyPath, value: Any, name: str) -> None:
        """Set a recipe key. Raises RecipeError where another key of theirs gave it another value."""
        path = tuple(key.split(".")) if isinstance(key, str) else key
        if path in self.values and self.values[path] != value:
            problem = f"gives {dotted_name(path)} {to_yaml(value)}"
            raise self.conflict(self.locate(name), problem, self.origins[path], self.values[path])
        self.values[path] = value
        self.origins.setdefault(path, name + (" (default)" if name in self.defaults else ""))

    def note(self, name: str, why: str, is_lost: bool = True) -> None:
        """List a key of theirs under the reason for which it is not in the recipe; `is_lost`: the user is told."""
        if name in self.defaults:
            return
        self.left.pop(name, None)
        names = self.notes.setdefault(why, [])
        names += [] if name in names else [name]
        if is_lost:
            self.lost.add(name)

    def conflict(self, where: str, problem: str, other: str, value: Any) -> RecipeError:
        """Return the error for two values of one key."""
        return RecipeError(Fault(where, f"{problem}, but {other} {to_yaml(value)}", "keep one of them"))

    def refuse(self, name: str, fix: str) -> RecipeError:
        """Return the error for a value that a recipe cannot follow."""
        value = self.theirs[name]
        shown = "set" if isinstance(value, (dict, list)) else one_line(str(value))
        return RecipeError(Fault(self.locate(name), f"is {shown}, which is not supported", fix))

    def locate(self, name: str) -> str:
        return self.source.get_location(self.places[name]) if name in self.places else f"{self.source.name} {name}"

    def choose(self, key: str, value: Any, name: str) -> Any:
        """Return the value here for a value of theirs; None, with a note, where there is none."""
        if key == "model.attn_implementation" and "/" in str(value):
            return value
        ours = find_value(key, value)
        if ours is None:
            is_lost = key != "model.attn_implementation"
            self.note(name, f"{key} has no `{one_line(str(value))[:60]}`", is_lost)
        return ours


def _to_path(key: str | Sequence[str]) -> KeyPath:
    return tuple(key.split(".")) if isinstance(key, str) else tuple(key)


def _answer_text(name: str) -> str:
    answer = find_answer((name,))
    return answer.text if answer is not None else ""


def _normalize(value: Any) -> str:
    """Return a value as text in lower case; of a list with one item that item."""
    item = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(item).lower()


def positive_number(value: Any) -> int | float | None:
    number = to_number(value)
    return number if is_number(number) and number > 0 else None


def _has_number(conversion: Conversion, names: Sequence[str]) -> bool:
    return any(positive_number(conversion.theirs.get(name, conversion.defaults.get(name))) for name in names)


def _with(conversion: Conversion, wanted: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bool:
    several: Sequence[Mapping[str, Any]] = [wanted] if isinstance(wanted, Mapping) else wanted
    for each in several:
        words = each.get("words")
        if conversion.is_any(each["keys"], words or each["values"], as_words=words is not None):
            return True
    return False


def _are_asked(conversion: Conversion, keys: Iterable[str]) -> bool:
    return any(_to_path(key) in {*conversion.values, *conversion.to_fill_in} for key in keys)


_TYPES = {"text": str, "list": list, "mapping": dict, "true or false": bool}
_CONSTANTS = {"CHATML": CHATML}
_CONDITIONS: Mapping[str, Callable[[Conversion, str, Any, Any], bool]] = {
    # Of the file
    "trainer": lambda conversion, name, value, wanted: conversion.trainer in wanted,
    "task": lambda conversion, name, value, wanted: conversion.task in wanted,
    "images": lambda conversion, name, value, wanted: conversion.has_images,
    "freezes": lambda conversion, name, value, wanted: (
        wanted in read_table()["trainers"][conversion.trainer].get("freeze", ())
    ),
    "with": lambda conversion, name, value, wanted: _with(conversion, wanted),
    "without": lambda conversion, name, value, wanted: not _with(conversion, wanted),
    "set": lambda conversion, name, value, wanted: any(key in conversion.theirs for key in conversion.expand(wanted)),
    "unset": lambda conversion, name, value, wanted: not any(key in conversion.theirs for key in wanted),
    "number": lambda conversion, name, value, wanted: _has_number(conversion, wanted),
    "no number": lambda conversion, name, value, wanted: not _has_number(conversion, wanted),
    "default": lambda conversion, name, value, wanted: any(key in conversion.defaults for key in wanted),
    "any": lambda conversion, name, value, wanted: any(conversion.holds(each, name, value) for each in wanted),
    # Of the recipe
    "has": lambda conversion, name, value, wanted: all(_to_path(key) in conversion.values for key in wanted),
    "lacks": lambda conversion, name, value, wanted: not any(_to_path(key) in conversion.values for key in wanted),
    "asked": lambda conversion, name, value, wanted: _are_asked(conversion, wanted),
    "not asked": lambda conversion, name, value, wanted: not _are_asked(conversion, wanted),
    "not zero": lambda conversion, name, value, wanted: bool(conversion.values[_to_path(wanted)]),
    # Of the value
    "values": lambda conversion, name, value, wanted: _normalize(value) in map(_normalize, wanted),
    "not values": lambda conversion, name, value, wanted: _normalize(value) not in map(_normalize, wanted),
    "named": lambda conversion, name, value, wanted: name in wanted,
    "type": lambda conversion, name, value, wanted: (
        is_number(value) if wanted == "number" else isinstance(value, _TYPES[wanted])
    ),
    "least": lambda conversion, name, value, wanted: value >= wanted,
    "most": lambda conversion, name, value, wanted: value <= wanted,
    "matches": lambda conversion, name, value, wanted: bool(re.fullmatch(wanted, value)),
    "exists": lambda conversion, name, value, wanted: Path(value).exists(),
    "metric": lambda conversion, name, value, wanted: value in ("loss", *find_task(str(conversion.task)).metric_names),
}
"""Condition in init_from.yaml -> (conversion, their key, value, what is wanted) -> whether it holds."""


def _read_json(value: Any) -> Any:
    with contextlib.suppress(ValueError):
        return parse_json(value) if isinstance(value, str) else value
    return value


def _split_names(value: Any) -> Any:
    is_list = isinstance(value, str) and re.fullmatch(r"[\w.-]+([,\s]+[\w.-]+)*", value)
    return re.split(r"[,\s]+", value) if is_list else value


def _first_field(value: Any, names: Sequence[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return next((value[name] for name in names if name in value), None)


def _count_per(value: Any, divisor: Any) -> int | None:
    whole, number = positive_number(value), to_number(divisor)
    if whole is None:
        return None
    return int(whole) // number if isinstance(number, int) and number else 1


def _at_least_one(value: Any) -> int:
    number = to_number(value)
    return max(int(number), 1) if is_number(number) else 500


def _other_words(value: Any, known: Sequence[str]) -> str:
    words = {*re.findall(r"\w+", str(value or "").lower())}
    return ", ".join(sorted(words - {*known}))


_TRANSFORMATIONS: Mapping[str, Callable[[Conversion, str, Any, Any], Any]] = {
    "number": lambda conversion, name, value, argument: to_number(value),
    "positive": lambda conversion, name, value, argument: positive_number(value),
    "whole": lambda conversion, name, value, argument: int(value),
    "scale": lambda conversion, name, value, argument: positive_number(value) and positive_number(value) * argument,
    "divide": lambda conversion, name, value, argument: value / argument,
    "whole part of": lambda conversion, name, value, argument: _count_per(value, conversion.theirs.get(argument, 1)),
    "number of": lambda conversion, name, value, argument: _at_least_one(conversion.theirs.get(argument, 500)),
    "text": lambda conversion, name, value, argument: str(value) if value else None,
    "without": lambda conversion, name, value, argument: str(value or "").removeprefix(argument),
    "not": lambda conversion, name, value, argument: not value,
    "flag": lambda conversion, name, value, argument: conversion.take(argument)[1] is True,
    "json": lambda conversion, name, value, argument: _read_json(value),
    "names": lambda conversion, name, value, argument: _split_names(value),
    "field": lambda conversion, name, value, argument: _first_field(value, argument),
    "column": lambda conversion, name, value, argument: {value: argument},
    "map": lambda conversion, name, value, argument: (
        None if value is None else conversion.choose(argument, value, name)
    ),
    "known": lambda conversion, name, value, argument: find_value(argument, value),
    "other words": lambda conversion, name, value, argument: _other_words(value, argument),
}
"""Transformation in init_from.yaml -> (conversion, their key, value, argument) -> value; `join` has several keys."""


@cache
def read_rows() -> dict[str, list[dict[str, Any]]]:
    """Return init_from.yaml."""
    rows: dict[str, list[dict[str, Any]]] = yaml.safe_load(
        Path(__file__).with_name("init_from.yaml").read_text(encoding="utf-8")
    )
    return rows


def to_number(value: Any) -> Any:
    """Return the number that a text is (YAML 1.1 reads 1e-4 as text), else the value itself."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        number = float(value)
        return int(number) if number.is_integer() and not re.search("[.eE]", value) else number
    return value
