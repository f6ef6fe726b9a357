"""YAML files and --set values as a SourceMap."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dstrain.errors import Fault, RecipeError, describe_decode_error, one_line
from dstrain.files import not_file_reason, read_limited
from dstrain.source_map import KeyPath, SourceMap, dotted_name, lookup

COMMAND_LINE = "--set"
"""Location of a key that --set wrote."""
MAX_RECIPE_BYTES = 1 << 20
"""Largest recipe that is read: PyYAML takes seconds for a megabyte."""
MAX_VALUES = 10_000
"""Limit on the values of a recipe: an alias (*) inside the block that it names would otherwise be followed forever."""


def read_yaml(path: Path) -> SourceMap:
    """Read the mapping in a YAML file. Raises RecipeError, with the line, for anything else."""
    source = SourceMap(path.name)
    if reason := not_file_reason(path):
        raise RecipeError(f"{path}: {reason}; save the recipe as a file")
    try:
        root, values = _parse_yaml(path)
    except ValueError as error:
        raise RecipeError(f"{path}: a value cannot be read ({error}); quote it if it is text") from None
    except (KeyError, AttributeError):  # PyYAML raises them too, for a tag with the wrong kind of value
        raise RecipeError(f"{path}: a tag (`!!name`) does not fit its value; write the plain value") from None
    except RecursionError:
        raise RecipeError(f"{path}: is nested too deeply; a recipe has few levels") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: is a {type(values).__name__}; a recipe is a mapping of keys such as `task: rm`")
    try:
        faults = list(_record_locations(root, (), source))
    except RecursionError:
        raise RecipeError(f"{path}: has an alias (*) inside the block it names; write the values out") from None
    if faults:
        raise RecipeError(faults)
    source.values = values
    return source


def _parse_yaml(path: Path) -> tuple[yaml.Node | None, Any]:
    """Return the nodes of a YAML file, which know their lines, and its value. Raises RecipeError."""
    try:
        content = read_limited(path, MAX_RECIPE_BYTES)
        text = content.decode("utf-8")
        # Twice: only the nodes have line numbers, and safe_load runs no code.
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
        message = known or f"{problem}; check the indentation and the colons there"
        raise RecipeError(f"{path}{line}: {message}") from None


_YAML_ERRORS = {
    "found character '\\t'": "a tab, which YAML does not accept as indentation; use spaces",
    "another document": "a second YAML document begins; a recipe is one: remove the `---`",
    "could not determine a constructor for the tag": "a tag (`!name`), which is not accepted; write the plain value",
    "found undefined tag handle": "a tag (`!name`), which is not accepted; write the plain value",
}
"""Part of PyYAML's message -> our message."""
_REFUSED_TAGS = ("binary", "set", "omap", "pairs")
"""Tags of YAML 1.1 whose values are no numbers, texts, lists or mappings."""
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


def _find_number_problem(node: yaml.Node) -> tuple[str, str] | None:
    """Return problem and fix of a number that YAML 1.1 reads unlike every reader: 1:30 is base 60, 010 is octal."""
    if not isinstance(node, yaml.ScalarNode) or node.tag.rpartition(":")[2] not in ("int", "float"):
        return None
    if not (_BASE_60.fullmatch(node.value) or _OCTAL.fullmatch(node.value)):
        return None
    number = yaml.safe_load(node.value)
    if ":" not in node.value and int(node.value) == number:
        return None
    notation = "base 60" if ":" in node.value else "octal"
    problem = f"{node.value} means {number:.15g} in YAML 1.1 ({notation})"
    return problem, "write the intended number, or quote it if it is text"


def _record_locations(node: yaml.Node | None, key: KeyPath, source: SourceMap) -> Iterator[Fault]:
    """Record the line of every key below the node; yield a fault for each key written twice."""
    if node is not None and node.tag.rpartition(":")[2] in _REFUSED_TAGS:
        raise RecipeError(
            f"{_node_location(node, source)}: a tag (`!!name`), which is not accepted; write the plain value"
        )
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            child = (*key, str(name.value))
            if len(source.locations) > MAX_VALUES:
                problem = f"holds more than {MAX_VALUES} values, each alias (*) counted"
                raise RecipeError(f"{source.name}: {problem}; write fewer")
            place = _node_location(name, source)
            # PyYAML itself keeps the last of two values without a word.
            if child in source.locations:
                problem = f"is set twice, also at {source.locations[child]}"
                yield Fault(f"{place} {dotted_name(child)}", problem, "keep one of them")
            source.locations[child] = place
            yield from _record_locations(value, child, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            source.locations[(*key, index)] = _node_location(value, source)
            yield from _record_locations(value, (*key, index), source)
    elif node is not None and key and (found := _find_number_problem(node)) is not None:
        yield Fault(source.get_location(key), *found)


def _node_location(node: yaml.Node, source: SourceMap) -> str:
    """Return `recipe.yaml:12`; `--set` for the command line, which has no lines."""
    return source.name if source.name == COMMAND_LINE else f"{source.name}:{node.start_mark.line + 1}"


def apply_override(source: SourceMap, text: str) -> None:
    """Set the value of a `--set KEY=VALUE`, over any value of the file. Raises RecipeError."""
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
    override = SourceMap(COMMAND_LINE, locations={names: COMMAND_LINE})
    if faults := list(_record_locations(root, names, override)):
        raise RecipeError(faults)
    block: Any = source.values
    for depth, name in enumerate(names[:-1], 1):
        if block.get(name) is None:
            block[name] = {}
        block = block[name]
        if not isinstance(block, dict):
            parent = dotted_name(names[:depth])
            problem = f"{parent} is not a block of keys in {source.name}"
            raise RecipeError(f"--set {text}: {problem}; write it as --set {parent}=VALUE")
    block[names[-1]] = parsed
    # Keys of the file inside the replaced block are gone.
    source.locations = {key: place for key, place in source.locations.items() if key[: len(names)] != names}
    source.locations[names] = COMMAND_LINE


def normalize_key(key: KeyPath, values: Any) -> KeyPath:
    """Return the key as the recipe has it, where one block is written in place of a list of one."""
    for depth, name in enumerate(key):
        if isinstance(name, int) and isinstance(values, dict) and name not in values:
            return normalize_key(key[:depth] + key[depth + 1 :], values)
        values = lookup(values, (name,))
    return key


def format_value(value: Any) -> str:
    """Return a value in Python's notation, at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
