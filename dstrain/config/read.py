"""Read a recipe: YAML and --set, every fault at once, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dstrain.config.names import FOREIGN, NOT_YET
from dstrain.config.rules import cross_field_faults
from dstrain.config.schema import RunConfig
from dstrain.errors import Fault, RecipeError, did_you_mean

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Recipe:
    """A recipe that fits the schema, and where it came from."""

    config: RunConfig
    name: str
    """The file's stem, or the task's name."""
    folder: Path
    """Relative paths are looked up in the working directory, then here."""


@dataclass
class _Written:
    """What the user wrote: the values, and for each key the place it was written at."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)
    name: str = "recipe"

    def where(self, key: Key) -> str:
        for end in range(len(key), 0, -1):
            if key[:end] in self.places:
                return f"{self.places[key[:end]]} {_dotted(key)}"
        below = next((place for other, place in self.places.items() if other[: len(key)] == key), self.name)
        return f"{below} {_dotted(key)}"


def read_recipe(
    path: Path | None, sets: Sequence[str] = (), task: str | None = None, ds_config: str | None = None
) -> Recipe:
    """The recipe in `path` (or none) with --set, --task and --ds-config applied.

    Raises RecipeError with every fault found: unknown keys (did you mean), wrong types and ranges,
    keys that clash, and keys whose feature does not exist yet.
    """
    written = _read_yaml(path) if path else _Written(name="--set")
    for text in sets:
        _apply_set(written, text)
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
    known = [_dotted(key) for key in _all_keys(RunConfig) if len(key) <= 2]  # deeper blocks count as one key
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


def _read_yaml(path: Path) -> _Written:
    written = _Written(name=path.name)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is no UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "is no YAML"
        raise RecipeError(f"{path}{line}: {problem}; check the indentation and the colons there") from None
    except ValueError as error:
        raise RecipeError(f"{path}: a value cannot be read ({error}); quote it if it is text") from None
    except RecursionError:
        raise RecipeError(f"{path}: is nested too deeply; a recipe has few levels") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: is a {type(values).__name__}; a recipe is a mapping of keys such as `task: rm`")
    try:
        faults = list(_walk(root, (), written))
    except RecursionError:
        raise RecipeError(f"{path}: has an alias (*) inside what it names; write the values out") from None
    if faults:
        raise RecipeError(faults)
    written.values = values
    return written


def _walk(node: yaml.Node | None, key: Key, written: _Written) -> Iterator[Fault]:
    """Note the line of every key below the node; yield a fault for each key written twice."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            child = (*key, str(name.value))
            place = f"{written.name}:{name.start_mark.line + 1}"
            if child in written.places:
                yield Fault(f"{place} {_dotted(child)}", f"stands at {written.places[child]} too", "keep one of them")
            written.places[child] = place
            yield from _walk(value, child, written)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            written.places[(*key, index)] = f"{written.name}:{value.start_mark.line + 1}"
            yield from _walk(value, (*key, index), written)


def _apply_set(written: _Written, text: str) -> None:
    dotted, equals, value = text.partition("=")
    names = tuple(dotted.strip().split("."))
    if not equals:
        raise RecipeError(f"--set {text}: has no value; write it as --set optim.lr=2e-5")
    if "" in names:
        raise RecipeError(f"--set {text}: names no key; write it as --set optim.lr=2e-5")
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"--set {text}: the value is no YAML; quote it for the shell and for YAML") from None
    block: Any = written.values
    for depth, name in enumerate(names[:-1], 1):
        if block.get(name) is None:
            block[name] = {}
        block = block[name]
        if not isinstance(block, dict):
            raise RecipeError(f"--set {text}: {_dotted(names[:depth])} is no block of keys in {written.name}")
    block[names[-1]] = parsed
    written.places = {key: place for key, place in written.places.items() if key[: len(names)] != names}
    written.places[names] = "--set"


def _schema_faults(error: ValidationError, written: _Written) -> Iterator[Fault]:
    """One fault for each place, however many branches of a union complained about it."""
    seen: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors():
        key = tuple(detail["loc"])
        while key and key not in written.places and _lookup(written.values, key) is None:
            key = key[:-1]
        if detail["type"] == "extra_forbidden" and key and key[-1] != detail["loc"][-1]:
            key = (*key, detail["loc"][-1])  # stands in a block without places of its own
        seen.setdefault(key or tuple(detail["loc"]), []).append(detail)
    for key, details in seen.items():
        unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
        if unknown:
            yield Fault(written.where(key), "no such key", _nearest(key))
            continue
        problems = " or ".join(dict.fromkeys(_problem(detail) for detail in details))
        yield Fault(written.where(key), f"is {_lookup(written.values, key)!r}, but {problems}", "correct the value")


def _problem(detail: ErrorDetails) -> str:
    name = detail["loc"][-1] if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"'{name}' is missing in it" if isinstance(name, str) else f"it needs at least {name + 1} values"
    if name == "[key]":
        return "its name is no text; put it in quotation marks"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return re.sub(r"a valid dictionary.*", "a block of keys", message).removeprefix("value error, ")


def _nearest(key: Key) -> str:
    """What was probably meant by an unknown key."""
    name = str(key[-1])
    if name in FOREIGN:
        return f"here it is {FOREIGN[name]}"
    siblings = list(_fields(RunConfig, key[:-1]))
    hint = did_you_mean(name, siblings)
    if hint.startswith("did you mean"):
        return hint
    elsewhere = [_dotted(other) for other in _all_keys(RunConfig) if other[-1] == name]
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


def _truths(raw: Any, read: Any, key: Key, written: _Written) -> Iterator[Fault]:
    """A fault for each true or false that was taken for the number 1 or 0."""
    if isinstance(raw, bool) and isinstance(read, (int, float)) and not isinstance(read, bool):
        yield Fault(written.where(key), f"is {raw!r}, but input should be a number", "correct the value")
    elif isinstance(raw, dict) and isinstance(read, dict):
        for name, value in raw.items():
            yield from _truths(value, read.get(name), (*key, name), written)
    elif isinstance(raw, list) and isinstance(read, (list, tuple)):
        for index, (value, taken) in enumerate(zip(raw, read, strict=False)):
            yield from _truths(value, taken, (*key, index), written)


def _not_yet_faults(values: Mapping[str, Any], written: _Written) -> list[Fault]:
    faults = []
    for dotted, asks, mend in NOT_YET:
        key = tuple(dotted.split("."))
        value = _lookup(values, key)
        if value is not None and asks(value):
            faults.append(Fault(written.where(key), f"{value!r} is not supported yet", mend))
    return faults


def _lookup(values: Any, key: Key) -> Any:
    for name in key:
        there = isinstance(values, dict) and name in values
        if not there and not (isinstance(values, list) and isinstance(name, int) and name < len(values)):
            return None
        values = values[name]
    return values


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key)
