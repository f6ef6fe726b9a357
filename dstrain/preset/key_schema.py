"""The table of keys DeepSpeed accepts, generated from DeepSpeed's own models by tools/make_ds_keys.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KeyPath = tuple[str, ...]
KeySpec = dict[str, Any]
"""What is known of one key: type, null, values, min, above, max, below, default, deprecated, keys."""

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "object": (dict,),
}
_TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "object": "an object",
}


@functools.cache
def load_key_schema() -> dict[str, Any]:
    """`deepspeed` (version), `removed` (paths) and `keys` (name -> Key)."""
    return json.loads((Path(__file__).parents[1] / "ds_keys.json").read_text(encoding="utf-8"))


def find_key(path: KeyPath) -> KeySpec | None:
    """The key at a path, or None where DeepSpeed knows none."""
    key: KeySpec = {"keys": load_key_schema()["keys"]}
    for name in path:
        if name not in key.get("keys", {}):
            return None
        key = key["keys"][name]
    return key


def find_parent_blocks(name: str) -> list[str]:
    """The blocks in which DeepSpeed does know a key of this name."""
    return sorted(
        {".".join(path[:-1]) for path in _iter_paths(load_key_schema()["keys"]) if path[-1] == name and len(path) > 1}
    )


def find_value_problem(spec: KeySpec, value: Any) -> tuple[str, str] | None:
    """What is wrong with a value and what to write instead; None where it fits."""
    if (value is None and spec.get("null", False)) or spec["type"] == "any":
        return None
    kinds = spec["type"].split("|")
    if not any(_has_type(kind, value) for kind in kinds):
        return f"the value is {format_json(value)}", f"write {describe_expected(spec)}"
    if "values" in spec and _fold_case(spec, value) not in [_fold_case(spec, known) for known in spec["values"]]:
        return f"the value is {format_json(value)}", f"write {describe_expected(spec)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not _is_in_bounds(spec, value):
        return f"the value {value} is out of bounds", f"write {describe_expected(spec)}"
    if "of" in spec and not all(isinstance(item, _TYPES[spec["of"]]) for item in value):
        return "the list holds something else than strings", "write a list of strings"
    return None


def describe_expected(spec: KeySpec) -> str:
    """What a key takes, in words: `a whole number above 0`."""
    if "values" in spec:
        return "one of " + ", ".join(format_json(value) for value in spec["values"])
    words = " or ".join(_TYPE_NAMES.get(kind, "anything") for kind in spec["type"].split("|"))
    bounds = [("min", "from {} on"), ("above", "above {}"), ("max", "up to {}"), ("below", "below {}")]
    words += "".join(" " + phrase.format(spec[bound]) for bound, phrase in bounds if bound in spec)
    return words + (" without quotation marks" if set(spec["type"].split("|")) <= {"bool", "int", "float"} else "")


def format_json(value: Any) -> str:
    """A value as JSON writes it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def cast_integers(block: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """A deep copy in which 5e8 is 500000000 where DeepSpeed wants a whole number: blocks parsed by hand do not cast."""
    return {name: _cast_integer(value, (*path, name)) for name, value in block.items()}


def _cast_integer(value: Any, path: KeyPath) -> Any:
    if isinstance(value, dict):
        return cast_integers(value, path)
    if isinstance(value, list):
        return list(value)
    key = find_key(path)
    whole = key is not None and key["type"] == "int" and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _has_type(type_name: str, value: Any) -> bool:
    if type_name == "any":
        return True
    if isinstance(value, bool):
        return type_name == "bool"
    return isinstance(value, _TYPES[type_name]) or (
        type_name == "int" and isinstance(value, float) and value.is_integer()
    )


def _fold_case(spec: KeySpec, value: Any) -> Any:
    return value.lower() if spec.get("any_case") and isinstance(value, str) else value


def _is_in_bounds(spec: KeySpec, value: float) -> bool:
    return (
        value >= spec.get("min", value)
        and value <= spec.get("max", value)
        and ("above" not in spec or value > spec["above"])
        and ("below" not in spec or value < spec["below"])
    )


def _iter_paths(specs: dict[str, KeySpec], parent: KeyPath = ()) -> Iterator[KeyPath]:
    for name, key in specs.items():
        yield (*parent, name)
        yield from _iter_paths(key.get("keys", {}), (*parent, name))
