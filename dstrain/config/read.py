"""Read a recipe: YAML and --set, every fault at once, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dstrain.config.aliases import ABSENT, FOREIGN, NOT_YET
from dstrain.config.field_types import without_secret
from dstrain.config.overrides import settle_overrides
from dstrain.config.rules import cross_field_faults
from dstrain.config.schema import RunConfig
from dstrain.config.source_map import Key, Written, apply_set, as_written, dotted_name, lookup, read_yaml, show
from dstrain.errors import Fault, RecipeError, did_you_mean


@dataclass(frozen=True)
class Recipe:
    """A recipe that fits the schema, and where it came from."""

    config: RunConfig
    name: str
    """The file's stem, or the task's name."""
    folder: Path
    """Relative paths are looked up in the working directory, then here."""


def read_recipe(
    path: Path | None, sets: Sequence[str] = (), task: str | None = None, ds_config: str | None = None
) -> Recipe:
    """The recipe in `path` (or none) with --set, --task and --ds-config applied; of keys that exclude each other the command
    line's counts.

    Raises RecipeError with every fault found: unknown keys (did you mean), wrong types and ranges,
    keys that clash, and keys whose feature does not exist yet.
    """
    written = read_yaml(path) if path else Written(name="--set")
    for text in sets:
        apply_set(written, text)
    settle_overrides(written)
    for key, option, value in (("task", "--task", task), ("ds_config", "--ds-config", ds_config)):
        if value is not None:
            written.values[key] = value
            written.places[(key,)] = option
    try:
        config = RunConfig.model_validate(written.values)
    except ValidationError as error:
        faults = list(_schema_faults(error, written))
        raise RecipeError(faults + _not_yet_faults(written.values, written)) from None
    faults = list(_truths(written.values, config.model_dump(), (), written))
    faults += _not_yet_faults(config.model_dump(), written)
    faults += [Fault(written.where(key), problem, mend) for key, problem, mend in cross_field_faults(config)]
    if faults:
        raise RecipeError(faults)
    name = path.stem if path else Path(config.task).stem
    return Recipe(config, name, path.parent.resolve() if path else Path.cwd())


def check_keys(names: Sequence[str], option: str) -> None:
    """Raise RecipeError for names that are no keys, where a command line names keys of the recipe."""
    known = [dotted_name(key) for key in _all_keys(RunConfig) if len(key) <= 2]  # deeper blocks count as one key
    faults = []
    for name in names:
        if name not in known and not name.startswith("options."):
            near = did_you_mean(name, known)
            mend = near if near.startswith("did you mean") else f"write it as the recipe has it: {option} optim.lr"
            faults.append(Fault(f"{option} {name}", "no such key", mend))
    if faults:
        raise RecipeError(faults)


def show_recipe(config: RunConfig) -> str:
    """The recipe as YAML, every key written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _schema_faults(error: ValidationError, written: Written) -> Iterator[Fault]:
    """One fault for each place, however many branches of a union complained about it."""
    seen: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors():
        loc = detail["loc"][:-2] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
        loc = tuple(name for name in loc if name not in _CHOICES)
        key = as_written(loc, written.values)
        while key and key not in written.places and not _stands_in(written.values, key):
            key = key[:-1]
        if detail["type"] == "extra_forbidden" and key and key[-1] != detail["loc"][-1]:
            key = (*key, detail["loc"][-1])  # stands in a block without places of its own
        seen.setdefault(key or tuple(detail["loc"]), []).append(detail)
    for key, details in seen.items():
        block = isinstance(lookup(written.values, key), dict) and any(other[:-1] == key for other in seen)
        if block and all(_problem(detail).startswith(_MUST) for detail in details):
            continue  # of another branch of a union
        unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
        if unknown:
            absent = ABSENT.get(str(key[-1]))
            yield Fault(written.where(key), absent or "no such key", "remove it" if absent else _nearest(key))
            continue
        value = without_secret(lookup(written.values, key))
        yield Fault(written.where(key), _problems(value, details), _mend(value, details))


_CHOICES = ("TokenizerConfig", "ProcessorConfig")
"""Names that pydantic puts into the place of an error: which branch of a union it tried."""


def _stands_in(values: Any, key: Key) -> bool:
    """Whether the key is there, be it null."""
    block = lookup(values, key[:-1])
    return lookup(values, key) is not None or (isinstance(block, dict) and key[-1] in block)


def _problems(value: Any, details: Sequence[ErrorDetails]) -> str:
    """`must be a whole number or 'epoch', got [1]`."""
    problems = list(dict.fromkeys(_problem(detail) for detail in details))
    wanted = [problem.removeprefix(_MUST) for problem in problems]
    if all(problem.startswith(_MUST) for problem in problems):
        return f"{_MUST}{' or '.join(wanted)}, got {show(value)}"
    return f"is {show(value)}, but {' or '.join(problems)}"


_MUST = "must be "
_KINDS = {
    "float": "a number",
    "int": "a whole number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a block of keys",
    "model": "a block of keys",
}
"""First word of pydantic's types of errors about the kind of a value -> that kind."""


def _problem(detail: ErrorDetails) -> str:
    name = detail["loc"][-1] if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"'{name}' is missing in it" if isinstance(name, str) else f"it needs at least {name + 1} values"
    if name == "[key]":
        return f"the name {detail['input']!r} in it is no text"
    kind, _, rest = detail["type"].partition("_")
    if kind in _KINDS and rest in ("type", "parsing", "from_float", "number", "attributes_type"):
        return _MUST + _KINDS[kind]
    message = detail["msg"][0].lower() + detail["msg"][1:]
    message = message.replace("tuple should", "it should").replace(" after validation", "")
    return message.removeprefix("value error, ").replace("input should be ", _MUST)


_MENDS = {
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "missing": "add what is missing",
}


def _mend(value: Any, details: Sequence[ErrorDetails]) -> str:
    """What to do about a value, by the first thing that is wrong with it."""
    words = [word for detail in details for word in re.findall(r"'([^']*)'", detail.get("ctx", {}).get("expected", ""))]
    near = did_you_mean(str(value), words) if words else ""
    if near.startswith("did you mean"):
        return near
    if details[0]["loc"][-1:] == ("[key]",):
        return "put it in quotation marks"
    return _MENDS.get(details[0]["type"], "correct the value")


def _nearest(key: Key) -> str:
    """What was probably meant by an unknown key."""
    name = str(key[-1])
    if name in FOREIGN:
        return f"here it is {FOREIGN[name]}"
    siblings = list(_fields(RunConfig, key[:-1]))
    hint = did_you_mean(name, siblings)
    if hint.startswith("did you mean"):
        return hint
    elsewhere = [dotted_name(other) for other in _all_keys(RunConfig) if other[-1] == name]
    return f"did you mean '{elsewhere[0]}'?" if elsewhere else hint


def _fields(model: type[BaseModel], key: Key) -> dict[str, Any]:
    """The fields of the section that `key` names."""
    for name in key:
        if isinstance(name, int) or name not in model.model_fields:
            continue
        found = _section(model.model_fields[name].annotation)
        if found is None:
            return {}
        model = found
    return dict(model.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if (found := _section(part)) is not None:
            return found
    return None


def _all_keys(model: type[BaseModel], above: Key = ()) -> Iterator[Key]:
    for name, info in model.model_fields.items():
        yield (*above, name)
        section = _section(info.annotation)
        if section is not None:
            yield from _all_keys(section, (*above, name))


def _truths(raw: Any, read: Any, key: Key, written: Written) -> Iterator[Fault]:
    """A fault for each true or false that was taken for the number 1 or 0."""
    if isinstance(raw, bool) and isinstance(read, (int, float)) and not isinstance(read, bool):
        yield Fault(written.where(key), f"must be a number, got {raw!r}", "correct the value")
    elif isinstance(raw, dict) and isinstance(read, dict):
        for name, value in raw.items():
            yield from _truths(value, read.get(name), (*key, name), written)
    elif isinstance(raw, list) and isinstance(read, (list, tuple)):
        for index, (value, taken) in enumerate(zip(raw, read, strict=False)):
            yield from _truths(value, taken, (*key, index), written)


def _not_yet_faults(values: Mapping[str, Any], written: Written) -> list[Fault]:
    faults = []
    for dotted, asks, mend in NOT_YET:
        key = tuple(dotted.split("."))
        value = lookup(values, key)
        if value is not None and asks(value):
            faults.append(Fault(written.where(key), f"{value!r} is not supported yet", mend))
    return faults
