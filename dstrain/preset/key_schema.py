"""The table of keys DeepSpeed accepts, generated from DeepSpeed's own models by tools/make_ds_keys.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.preset.source_map import KeyPath

Key = dict[str, Any]
"""What is known of one key: type, null, values, min, above, max, below, default, deprecated, keys."""

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "object": (dict,),
}
_NOUNS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "object": "an object",
}


@functools.cache
def table() -> dict[str, Any]:
    """`deepspeed` (version), `removed` (paths) and `keys` (name -> Key)."""
    return json.loads((Path(__file__).parents[1] / "ds_keys.json").read_text(encoding="utf-8"))


def find(path: KeyPath) -> Key | None:
    """The key at a path, or None where DeepSpeed knows none."""
    key: Key = {"keys": table()["keys"]}
    for name in path:
        if name not in key.get("keys", {}):
            return None
        key = key["keys"][name]
    return key


def homes(name: str) -> list[str]:
    """The blocks in which DeepSpeed does know a key of this name."""
    return sorted({".".join(path[:-1]) for path in _paths(table()["keys"]) if path[-1] == name and len(path) > 1})


def misfit(key: Key, value: Any) -> tuple[str, str] | None:
    """What is wrong with a value and what to write instead; None where it fits."""
    if (value is None and key.get("null", False)) or key["type"] == "any":
        return None
    kinds = key["type"].split("|")
    if not any(_is_a(kind, value) for kind in kinds):
        return f"the value is {show(value)}", f"write {expected(key)}"
    if "values" in key and _case(key, value) not in [_case(key, known) for known in key["values"]]:
        return f"the value is {show(value)}", f"write {expected(key)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not _in_bounds(key, value):
        return f"the value {value} is out of bounds", f"write {expected(key)}"
    if "of" in key and not all(isinstance(item, _TYPES[key["of"]]) for item in value):
        return "the list holds something else than strings", "write a list of strings"
    return None


def expected(key: Key) -> str:
    """What a key takes, in words: `a whole number above 0`."""
    if "values" in key:
        return "one of " + ", ".join(show(value) for value in key["values"])
    words = " or ".join(_NOUNS.get(kind, "anything") for kind in key["type"].split("|"))
    bounds = [("min", "from {} on"), ("above", "above {}"), ("max", "up to {}"), ("below", "below {}")]
    words += "".join(" " + phrase.format(key[bound]) for bound, phrase in bounds if bound in key)
    return words + (" without quotation marks" if set(key["type"].split("|")) <= {"bool", "int", "float"} else "")


def show(value: Any) -> str:
    """A value as JSON writes it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def whole_numbers(block: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """A deep copy in which 5e8 is 500000000 where DeepSpeed wants a whole number: blocks parsed by hand do not cast."""
    return {name: _whole(value, (*path, name)) for name, value in block.items()}


def _whole(value: Any, path: KeyPath) -> Any:
    if isinstance(value, dict):
        return whole_numbers(value, path)
    if isinstance(value, list):
        return list(value)
    key = find(path)
    whole = key is not None and key["type"] == "int" and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _is_a(kind: str, value: Any) -> bool:
    if kind == "any":
        return True
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(value, _TYPES[kind]) or (kind == "int" and isinstance(value, float) and value.is_integer())


def _case(key: Key, value: Any) -> Any:
    return value.lower() if key.get("any_case") and isinstance(value, str) else value


def _in_bounds(key: Key, value: float) -> bool:
    return (
        value >= key.get("min", value)
        and value <= key.get("max", value)
        and ("above" not in key or value > key["above"])
        and ("below" not in key or value < key["below"])
    )


def _paths(keys: dict[str, Key], above: KeyPath = ()) -> Iterator[KeyPath]:
    for name, key in keys.items():
        yield (*above, name)
        yield from _paths(key.get("keys", {}), (*above, name))
