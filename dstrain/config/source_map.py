"""What a recipe's author wrote: the values of a YAML file and of --set, each with the place it was written at."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dstrain.errors import Fault, RecipeError, describe_decode_error, one_line

KeyPath = tuple[str | int, ...]

MAX_VALUES = 10_000
"""A recipe is short; an alias (*) inside what others name would otherwise be followed for ever."""


@dataclass
class SourceMap:
    """What the user wrote: the values, and for each key the place it was written at."""

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, str] = field(default_factory=dict)
    name: str = "recipe"
    has_lines: bool = True
    """False where it was not written in lines: on the command line."""

    def get_node_location(self, node: yaml.Node) -> str:
        """`recipe.yaml:12`, or the name alone."""
        return f"{self.name}:{node.start_mark.line + 1}" if self.has_lines else self.name

    def get_location(self, key: KeyPath) -> str:
        """`recipe.yaml:12 optim.lr`, for messages."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.locations:
                return f"{self.locations[key[:end]]} {dotted_name(key)}"
        below = next((place for other, place in self.locations.items() if other[: len(key)] == key), self.name)
        return f"{below} {dotted_name(key)}"


def read_yaml(path: Path) -> SourceMap:
    """The mapping in a YAML file. Raises RecipeError."""
    written = SourceMap(name=path.name)
    try:
        root, values = _parse_yaml(path)
    except ValueError as error:
        raise RecipeError(f"{path}: a value cannot be read ({error}); quote it if it is text") from None
    except (KeyError, AttributeError):  # what PyYAML raises besides
        raise RecipeError(f"{path}: a tag (`!!name`) does not fit its value; write the plain value") from None
    except RecursionError:
        raise RecipeError(f"{path}: is nested too deeply; a recipe has few levels") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: is a {type(values).__name__}; a recipe is a mapping of keys such as `task: rm`")
    try:
        faults = list(_record_locations(root, (), written))
    except RecursionError:
        raise RecipeError(f"{path}: has an alias (*) inside what it names; write the values out") from None
    if faults:
        raise RecipeError(faults)
    written.values = values
    return written


def _parse_yaml(path: Path) -> tuple[yaml.Node | None, Any]:
    """The nodes of a YAML file, with their lines, and its value. Raises RecipeError."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
        return yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: {describe_decode_error(content, error)}") from None
    except yaml.reader.ReaderError as error:
        place = f"{path}:{text.count(chr(10), 0, error.position) + 1}"
        raise RecipeError(f"{place}: YAML does not allow the character {chr(error.character)!r}; remove it") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        known = next((words for part, words in _YAML_ERRORS.items() if part in problem), None)
        raise RecipeError(
            f"{path}{line}: {known or f'{problem}; check the indentation and the colons there'}"
        ) from None


_YAML_ERRORS = {
    "found character '\\t'": "a tab, which YAML does not accept as indentation; use spaces",
    "another document": "a second YAML document begins; a recipe is one: remove the `---`",
    "could not determine a constructor for the tag": "a tag (`!name`), which is not accepted; write the plain value",
    "found undefined tag handle": "a tag (`!name`), which is not accepted; write the plain value",
}
"""Part of what PyYAML says -> what is said instead."""
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


def _find_number_problem(node: yaml.Node) -> tuple[str, str] | None:
    """The problem and the fix of a number that YAML 1.1 takes for another one than everybody reads."""
    if not isinstance(node, yaml.ScalarNode) or node.tag.rpartition(":")[2] not in ("int", "float"):
        return None
    if not (_BASE_60.fullmatch(node.value) or _OCTAL.fullmatch(node.value)):
        return None
    number = yaml.safe_load(node.value)
    if ":" not in node.value and int(node.value) == number:
        return None
    how = "base 60" if ":" in node.value else "octal"
    problem = f"{node.value} means {number:.15g} in YAML 1.1 ({how})"
    return problem, "write the number that is meant, or quote it if it is text"


def _check_number(node: yaml.Node, where: str) -> Iterator[Fault]:
    if (found := _find_number_problem(node)) is not None:
        yield Fault(where, *found)


def _record_locations(node: yaml.Node | None, key: KeyPath, source: SourceMap) -> Iterator[Fault]:
    """Note the line of every key below the node; yield a fault for each key written twice."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            child = (*key, str(name.value))
            if len(source.locations) > MAX_VALUES:
                raise RecipeError(
                    f"{source.name}: holds more than {MAX_VALUES} values, each alias (*) counted; write fewer"
                )
            place = source.get_node_location(name)
            if child in source.locations:
                yield Fault(
                    f"{place} {dotted_name(child)}",
                    f"is set twice, also at {source.locations[child]}",
                    "keep one of them",
                )
            source.locations[child] = place
            yield from _record_locations(value, child, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            source.locations[(*key, index)] = source.get_node_location(value)
            yield from _record_locations(value, (*key, index), source)
    elif node is not None and key:
        yield from _check_number(node, source.get_location(key))


def apply_override(source: SourceMap, text: str) -> None:
    """Write what `--set KEY=VALUE` says over what was there. Raises RecipeError."""
    dotted, equals, value = text.partition("=")
    names, text = tuple(dotted.strip().split(".")), one_line(text)
    if not equals:
        raise RecipeError(f"--set {text}: has no value; write it as --set optim.lr=2e-5")
    if "" in names:
        raise RecipeError(f"--set {text}: names no key; write it as --set optim.lr=2e-5")
    try:
        parsed, root = yaml.safe_load(value), yaml.compose(value, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError):
        raise RecipeError(f"--set {text}: the value is not valid YAML; quote it for the shell and for YAML") from None
    if faults := list(
        _record_locations(root, names, SourceMap(locations={names: "--set"}, name="--set", has_lines=False))
    ):
        raise RecipeError(faults)
    block: Any = source.values
    for depth, name in enumerate(names[:-1], 1):
        if block.get(name) is None:
            block[name] = {}
        block = block[name]
        if not isinstance(block, dict):
            raise RecipeError(
                f"--set {text}: {dotted_name(names[:depth])} is no block of keys in {source.name}; "
                f"write it as --set {dotted_name(names[:depth])}=VALUE"
            )
    block[names[-1]] = parsed
    source.locations = {key: place for key, place in source.locations.items() if key[: len(names)] != names}
    source.locations[names] = "--set"


def lookup(values: Any, key: KeyPath) -> Any:
    """The value at a key, None where there is none."""
    for name in key:
        there = isinstance(values, dict) and name in values
        if not there and not (isinstance(values, list) and isinstance(name, int) and name < len(values)):
            return None
        values = values[name]
    return values


def normalize_key(key: KeyPath, values: Any) -> KeyPath:
    """The key as the recipe has it, where one block stands for a list of one."""
    for depth, name in enumerate(key):
        if isinstance(name, int) and isinstance(values, dict) and name not in values:
            return normalize_key(key[:depth] + key[depth + 1 :], values)
        values = lookup(values, (name,))
    return key


def dotted_name(key: KeyPath) -> str:
    """`optim.lr`."""
    return one_line(".".join(str(part) for part in key))


def format_value(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
