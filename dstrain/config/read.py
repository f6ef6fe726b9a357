"""Recipe reading and validation, with source lines in every error."""

from __future__ import annotations

import copy
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import StringIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MantissaNoDotYAML1_1Warning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.reader import ReaderError

from dstrain.config.aliases import find_answer, find_trainer, find_value, iter_foreign_keys, read_values
from dstrain.config.schema import RunConfig, check_cross_fields, hide_secret
from dstrain.errors import (
    URL_PASSWORD,
    Fault,
    KeyPath,
    RecipeError,
    SourceMap,
    describe_decode_error,
    dotted_name,
    lookup,
    one_line,
    suggest_name,
)
from dstrain.files import not_file_reason, read_limited

COMMAND_LINE = "--set"
"""Location of a key that --set wrote."""
MAX_RECIPE_BYTES = 1 << 20
"""Largest recipe that is read: a megabyte takes seconds."""
MAX_VALUES = 10_000
"""Limit on the values of a recipe: an alias (*) inside the block that it names would otherwise be followed forever."""


class OptionLookup(Protocol):
    """Knowledge of the tasks' options, which are defined in a layer above this one."""

    def find_type(self, task: str, option: str) -> Any:
        """Return the annotation of an option of a task, such as `synthetic.num_samples`; None for an unknown one."""

    def find_place(self, task: str, name: str) -> str:
        """Return `options.NAME`, with the task where it is another one, for a name of an option; else an empty text."""


def read_yaml(path: Path, version: str = "1.2") -> SourceMap:
    """Read the mapping in a YAML file. Raises RecipeError, with the line, for anything else.

    `version`: of YAML; in 1.1 `no` is false, `010` is 8 and `1:30` is 90.
    """
    source = SourceMap(path.name)
    if reason := not_file_reason(path):
        raise RecipeError(f"{path}: {reason}; save the recipe as a file")
    if path.suffix in (".sh", ".bash"):
        fix = f"`dstrain init --from {shlex.quote(str(path))} --to recipe.yaml` reads the training that it starts"
        raise RecipeError(f"{path}: is a script; {fix}")
    text = read_text(path)
    try:
        values, locations = _parse_yaml(text, path.name, version)
    except (YAMLError, ValueError, RecursionError) as error:
        raise _explain_yaml_error(error, text, source, path) from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: is a {type(values).__name__}; a recipe is a mapping of keys such as `task: rm`")
    source.values, source.locations = copy.deepcopy(values), dict(locations)
    return source


@lru_cache(maxsize=64)  # a command reads the recipe of a run several times, and ruamel.yaml takes 10 ms for it
def _parse_yaml(text: str, name: str, version: str) -> tuple[Any, dict[KeyPath, str]]:
    """Return the value of a YAML text and the lines of its keys. The caller must not change them."""
    source = SourceMap(name)
    return _load_yaml(text, source, version), source.locations


def read_text(path: Path) -> str:
    """Return the text of a file that a user wrote. Raises RecipeError."""
    try:
        content = read_limited(path, MAX_RECIPE_BYTES)
        return content.decode("utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: {describe_decode_error(content, error)}") from None


def _load_yaml(text: str, source: SourceMap, version: str = "1.2", key: KeyPath = ()) -> Any:
    """Return the value of a YAML text, and record the lines of its keys below `key`. Runs no code."""
    reader = YAML(typ="safe", pure=True)
    reader.version = version
    node = reader.compose(StringIO(text))
    _record_locations(node, key, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MantissaNoDotYAML1_1Warning)  # of 1e-5 in YAML 1.1
        return None if node is None else reader.constructor.construct_document(node)


def _explain_yaml_error(error: Exception, text: str, source: SourceMap, path: Path | str) -> RecipeError:
    """Return the error for a YAML text that cannot be read."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, RecursionError):
        return RecipeError(
            f"{path}: is nested too deeply, or has an alias (*) inside the block it names; write the values out"
        )
    if isinstance(error, ReaderError):
        place = f"{path}:{text.count(chr(10), 0, error.position) + 1}"
        return RecipeError(f"{place}: YAML does not allow the character {chr(error.character)!r}; remove it")
    if isinstance(error, DuplicateKeyError):
        name = _DUPLICATE.search(str(error.problem))
        place = _place(source, mark)
        return RecipeError(f"{place} {one_line(name[1]) if name else ''}: is set twice; keep one of them")
    if not isinstance(error, YAMLError):
        return RecipeError(f"{path}: a value cannot be read ({error}); quote it if it is text")
    line = f":{mark.line + 1}" if mark else ""
    problem = getattr(error, "problem", None) or "not valid YAML"
    known = next((words for part, words in _YAML_ERRORS.items() if part in problem), None)
    return RecipeError(f"{path}{line}: {known or f'{problem}; check the indentation and the colons there'}")


_YAML_ERRORS = {
    "found character '\\t'": "a tab, which YAML does not accept as indentation; use spaces",
    "another document": "a second YAML document begins; a recipe is one: remove the `---`",
    "expected alphabetic or numeric character": "a value begins with `*` or `&`; put it in quotes",
    "undefined alias": "a value begins with `*` or `&`; put it in quotes",
    "failed to construct": "a tag (`!!name`) does not fit its value; write the plain value",
    "found undefined tag handle": "a tag (`!name`), which is not accepted; write the plain value",
}
"""Part of the library's message -> our message."""
_DUPLICATE = re.compile('found duplicate key "(.*?)" with')
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "map", "seq", "merge", "timestamp")


def _record_locations(node: Node | None, key: KeyPath, source: SourceMap) -> None:
    """Record the line of every key below the node. Raises RecipeError for a tag that makes another type."""
    if node is None:
        return
    if str(node.tag).rpartition("2002:")[2] not in _PLAIN_TAGS:
        place = _place(source, node.start_mark)
        raise RecipeError(f"{place}: a tag (`!name`), which is not accepted; write the plain value")
    if len(source.locations) > MAX_VALUES:
        problem = f"holds more than {MAX_VALUES} values, each alias (*) counted"
        raise RecipeError(f"{source.name}: {problem}; write fewer")
    if isinstance(node, MappingNode):
        for name, value in node.value:
            child = (*key, str(name.value))
            source.locations[child] = _place(source, name.start_mark)
            _record_locations(value, child, source)
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            source.locations[(*key, index)] = _place(source, value.start_mark)
            _record_locations(value, (*key, index), source)


def _place(source: SourceMap, mark: Any) -> str:
    """Return `recipe.yaml:12`; `--set` for the command line, which has no lines."""
    return source.name if source.name == COMMAND_LINE else f"{source.name}:{mark.line + 1}"


def apply_override(source: SourceMap, text: str, options: OptionLookup | None = None, task: str = "") -> None:
    """Set the value of a `--set KEY=VALUE`, over any value of the file. Raises RecipeError.

    A key whose type is text takes the value as text, but for null and a text in quotes. Null removes a key that cannot
    be null. `task`: whose options `options` are looked up.
    """
    dotted, equals, value = text.partition("=")
    names, text = tuple(dotted.strip().split(".")), one_line(text)
    if not equals:
        raise RecipeError(f"--set {text}: has no value; write it as --set optim.lr=2e-5")
    if "" in names:
        raise RecipeError(f"--set {text}: names no key; write it as --set optim.lr=2e-5")
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # of bytes that are not UTF-8
        raise RecipeError(f"--set {text}: is not valid UTF-8; rename the file or folder, or choose another")
    accepted = _find_types(names, options, task)
    is_text = str in accepted and accepted <= {str, NoneType}
    override = SourceMap(COMMAND_LINE, locations={names: COMMAND_LINE})
    try:
        parsed = _load_yaml(value, override, key=names)
    except (YAMLError, ValueError, RecursionError, RecipeError) as error:
        if not is_text and isinstance(error, DuplicateKeyError):
            raise _explain_yaml_error(error, value, override, COMMAND_LINE) from None
        if not is_text:
            problem = "the value is not valid YAML; quote it for the shell and for YAML"
            raise RecipeError(f"--set {text}: {problem}") from None
        parsed = value
    if is_text and parsed is not None and not isinstance(parsed, str):
        parsed = value.strip()
    if parsed is None and accepted and NoneType not in accepted:
        _drop_key(source, names)
        return
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


def is_number_key(key: str) -> bool:
    """Return whether the values of a key of a recipe are numbers, without words and switches."""
    types = _find_types(tuple(key.split(".")), None, "") - {NoneType}
    return bool(types) and types <= {int, float}


def _find_types(key: KeyPath, options: OptionLookup | None, task: str) -> set[Any]:
    """Return the types that a key accepts, `dict` for a block; empty for an unknown key."""
    if key[0] == "options":
        annotation = options.find_type(task, ".".join(map(str, key[1:]))) if options and task and len(key) > 1 else None
    else:
        field = _section_fields(RunConfig, key[:-1]).get(str(key[-1]))
        annotation = None if field is None else field.annotation
    return set() if annotation is None else set(_iter_types(annotation))


def _iter_types(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union and the types of the values of a Literal."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _iter_types(parts[0])
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _iter_types(part)
    elif origin is Literal:
        yield Literal
        yield from (NoneType for part in parts if part is None)
    else:
        yield origin or annotation


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


@dataclass(frozen=True)
class Recipe:
    """A valid recipe, and where it came from."""

    config: RunConfig
    name: str
    """Stem of the file, or the task's name."""
    folder: Path
    """Folder in which relative paths are looked up after the working directory."""
    source: SourceMap = field(default_factory=lambda: SourceMap(COMMAND_LINE))
    """The values as they were written, with the line of each key."""

    def locate_key(self, where: str) -> str:
        """Return `recipe.yaml:12 optim.lr` for a place `optim.lr`; other places as they are."""
        key, _, rest = where.partition(" ")
        # `options.safety.helpful_rm: model.config` is a key of another run's recipe.
        path, end = tuple(key.removesuffix(":").split(".")), ":" * key.endswith(":")
        is_file = ":" in key[:-1] or path[-1] in ("json", "jsonl", "gz", "parquet", "yaml", "yml")
        if path[0] not in RunConfig.model_fields or is_file or not self.source.values:
            return where
        return f"{self.source.get_location(path)}{end} {rest}".rstrip()


def read_recipe(
    path: Path | None,
    overrides: Sequence[str] = (),
    task: str | None = None,
    ds_config: str | None = None,
    options: OptionLookup | None = None,
) -> Recipe:
    """Read the recipe in `path` (or none) with --set, --task and --ds-config applied.

    Of mutually exclusive keys, the one on the command line counts. Raises RecipeError with every fault found: unknown
    keys (did you mean), wrong types and ranges, conflicting keys, and keys of features that do not exist yet. `options`:
    for values and names of the task's options.
    """
    source = read_yaml(path) if path else SourceMap(COMMAND_LINE)
    named = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith("task=")), None)
    of_task = task or named or str(source.values.get("task") or "")
    for text in overrides:
        apply_override(source, text, options, of_task)
    for key, option, value in (("task", "--task", task), ("ds_config", "--ds-config", ds_config)):
        if value is not None:
            source.values[key] = value
            source.locations[(key,)] = option
    resolve_overrides(source)
    config = check_values(source, os.path.relpath(path) if path else "", options)
    name = path.stem if path else Path(config.task).stem
    return Recipe(config, name, path.parent.resolve() if path else Path.cwd(), source)


def check_values(source: SourceMap, file: str = "", options: OptionLookup | None = None) -> RunConfig:
    """Return the recipe that the values are. Raises RecipeError with every fault found.

    `file`: the path of the source, as the working directory has it. `options`: for names of the task's options.
    """
    try:
        config = RunConfig.model_validate(source.values)
    except ValidationError as error:
        faults = _list_known_once(_schema_faults(error, source, options))
        if "task" not in source.values and (trainer := find_trainer(source.values)):
            fix = f"`dstrain init --from {shlex.quote(file or source.name)} --to recipe.yaml` writes the recipe"
            faults.append(Fault(source.name, f"is a configuration of {trainer}", fix))
        raise RecipeError(faults) from None
    # pydantic takes true for 1, also where a number is meant.
    faults = list(_bool_faults(source.values, config.model_dump(), (), source))
    faults += [Fault(source.get_location(key), problem, fix) for key, problem, fix in check_cross_fields(config)]
    faults += list(_password_faults(config.model_dump(mode="json"), (), source))
    if faults:
        raise RecipeError(faults)
    return config


def list_keys() -> list[str]:
    """Return the recipe keys, such as optim.lr; deeper blocks count as one key."""
    return [dotted_name(key) for key in _iter_keys(RunConfig) if len(key) <= 2]


def check_keys(names: Sequence[str], option: str) -> None:
    """Raise RecipeError for names in a command-line option that are not recipe keys."""
    if not names:
        return
    known = list_keys()
    faults = []
    for name in names:
        if name not in known and not name.startswith("options."):
            near = suggest_name(name, known)
            fix = near if near.startswith("did you mean") else f"write it as the recipe has it: {option} optim.lr"
            faults.append(Fault(f"{option} {name}", "no such key", fix))
    if faults:
        raise RecipeError(faults)


def dump_recipe(config: RunConfig) -> str:
    """Return the recipe as YAML, with every key."""
    return dump_yaml(config.model_dump(mode="json"))


class _Dumper(yaml.SafeDumper):
    """PyYAML's, which quotes the texts that are numbers in YAML 1.2 only, too: all readers read the same."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_.]*[eE][-+]?[0-9]+"), [*"-+0123456789"]
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"0o[0-7_]+"), ["0"])


def dump_yaml(value: Any, **options: Any) -> str:
    """Return a value as YAML, with its keys in their order. `options`: of `yaml.dump`."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **options)
    return text


def _schema_faults(error: ValidationError, source: SourceMap, options: OptionLookup | None) -> Iterator[Fault]:
    """Yield one fault per location, however many branches of a union reported it."""
    seen: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors():
        loc = detail["loc"][:-2] if detail["loc"][-1:] == ("[key]",) else detail["loc"]
        loc = tuple(name for name in loc if name not in _UNION_BRANCHES)
        key = normalize_key(loc, source.values)
        while key and key not in source.locations and not _has_key(source.values, key):
            key = key[:-1]
        if detail["type"] == "extra_forbidden" and key and key[-1] != detail["loc"][-1]:
            key = (*key, detail["loc"][-1])  # an unknown key with a name of _UNION_BRANCHES
        seen.setdefault(key or tuple(detail["loc"]), []).append(detail)
    for key, details in seen.items():
        block = isinstance(lookup(source.values, key), dict) and any(other[:-1] == key for other in seen)
        if block and all(_describe_problem(detail).startswith(_MUST_BE) for detail in details):
            continue  # reported by another branch of a union, such as text for a block
        unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
        if unknown:
            yield from _unknown_key_faults(key, source, options)
            continue
        value = hide_secret(lookup(source.values, key))
        fix = _suggest_value(key, value) or _suggest_fix(value, details)
        yield Fault(source.get_location(key), _describe_problems(value, details), fix)


_UNION_BRANCHES = ("TokenizerConfig", "ProcessorConfig")
"""Class names that pydantic inserts into the location of an error, for the branch of a union that it tried."""


def _has_key(values: Any, key: KeyPath) -> bool:
    """Return True where the key exists, also with the value null."""
    block = lookup(values, key[:-1])
    return lookup(values, key) is not None or (isinstance(block, dict) and key[-1] in block)


def _describe_problems(value: Any, details: Sequence[ErrorDetails]) -> str:
    """Return `must be a whole number or 'epoch', got [1]`."""
    problems = list(dict.fromkeys(_describe_problem(detail) for detail in details))
    expected = [problem.removeprefix(_MUST_BE) for problem in problems]
    if all(problem.startswith(_MUST_BE) for problem in problems):
        return f"{_MUST_BE}{' or '.join(expected)}, got {format_value(value)}"
    return f"is {format_value(value)}, but {' or '.join(problems)}"


_MUST_BE = "must be "
_TYPE_NAMES = {
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
"""First word of pydantic's error types about a value's type -> name of that type."""


def _describe_problem(detail: ErrorDetails) -> str:
    name = detail["loc"][-1] if detail["loc"] else ""
    if detail["type"] == "missing":
        return f"'{name}' is missing in it" if isinstance(name, str) else f"it needs at least {name + 1} values"
    if name == "[key]":
        return f"the name {detail['input']!r} in it is not text"
    if detail["type"] == "string_unicode":
        return "it is not valid UTF-8"
    kind, _, rest = detail["type"].partition("_")
    if kind in _TYPE_NAMES and rest in ("type", "parsing", "from_float", "number", "attributes_type"):
        return _MUST_BE + _TYPE_NAMES[kind]
    message = detail["msg"][0].lower() + detail["msg"][1:]
    message = message.replace("tuple should", "it should").replace(" after validation", "")
    return message.removeprefix("value error, ").replace("input should be ", _MUST_BE)


_BLOCK_KEYS: dict[KeyPath, tuple[str, str]] = {
    ("model",): ("path", "NAME"),
    ("optim",): ("name", "adamw"),
    ("batch",): ("total", "64"),
    ("data",): ("train", "FILE"),
    ("model", "lora"): ("rank", "16"),
    ("log", "wandb"): ("project", "NAME"),
}
"""Block -> the key in it that is meant where a single value is written, and an example."""


def _suggest_value(key: KeyPath, value: Any) -> str:
    """Return what another trainer's value is here, or how a block is written; empty where neither is known."""
    dotted = dotted_name(key)
    if dotted in read_values() and (ours := find_value(dotted, value)) is not None:
        return f"here it is {ours}"
    if key not in _BLOCK_KEYS or isinstance(value, (dict, list)) or value is None:
        return ""
    inner, example = _BLOCK_KEYS[key]
    if isinstance(value, bool):
        return f"write `{key[-1]}: {{{inner}: {example}}}`" + ("" if value else ", or leave it out")
    given = (find_value("optim.name", value) or value) if key == ("optim",) else value
    return f"write `{key[-1]}: {{{inner}: {one_line(str(given))}}}`"


_FIXES = {
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "missing": "add what is missing",
    "string_unicode": "rename the file or folder, or choose another",
}


def _suggest_fix(value: Any, details: Sequence[ErrorDetails]) -> str:
    """Return the fix for a value, by its first problem."""
    words = [word for detail in details for word in re.findall(r"'([^']*)'", detail.get("ctx", {}).get("expected", ""))]
    near = suggest_name(str(value), words) if words else ""
    if near.startswith("did you mean"):
        return near
    if details[0]["loc"][-1:] == ("[key]",):
        return "put it in quotation marks"
    if value is None and details[0]["type"] != "missing":
        return "give it a value, or remove it"
    wants_list = details[0]["type"] in ("list_type", "tuple_type")
    if wants_list and isinstance(value, str) and "," in value:
        return f"write [{one_line(value)}]"
    return _FIXES.get(details[0]["type"], "correct the value")


def _list_known_once(faults: Iterator[Fault]) -> list[Fault]:
    """Return the faults, of which the first lists the known keys of a block, and the others of that block do not."""
    listed: set[str] = set()
    found = []
    for fault in faults:
        found.append(replace(fault, fix="correct or remove it") if fault.fix in listed else fault)
        listed |= {fault.fix} if fault.fix.startswith("known here: ") else set()
    return found


def _unknown_key_faults(key: KeyPath, source: SourceMap, options: OptionLookup | None) -> Iterator[Fault]:
    """Yield a fault for the key, or where it is a block of another trainer one for each key in it."""
    inner = iter_foreign_keys({key[-1]: lookup(source.values, key)}) if len(key) == 1 else [key]
    first: dict[KeyPath, KeyPath] = {}
    for path in inner:
        first.setdefault(tuple(part for part in path if not isinstance(part, int)), path)
    for name, path in first.items():
        yield Fault(source.get_location(path), "no such key", _suggest_key(name, path, source, options))


def _suggest_key(key: KeyPath, path: KeyPath, source: SourceMap, options: OptionLookup | None) -> str:
    """Return what the key is here, if it is another trainer's or an option, or the key that was probably meant.

    `path`: the key with the indices of lists.
    """
    name, siblings = str(key[-1]), list(_section_fields(RunConfig, key[:-1]))
    task = str(source.values.get("task") or "")
    place = options.find_place(task, name) if options is not None else ""
    if place == f"options.{name}":
        return f"here it is {place}"
    answer = find_answer(key)
    if answer is None and place:
        return f"here it is {place}"
    value = lookup(source.values, path)
    answer = answer and answer.for_value(value)
    if answer is not None and answer.kind == "keys" and answer.text in read_values():
        ours = find_value(answer.text, value)
        return f"{answer}" + (f": {ours}" if ours not in (None, value) else "")
    # In a block of ours a reason for leaving out another trainer's key would be about another thing, but in that of peft.
    is_theirs = len(key) == 1 or key[0] not in RunConfig.model_fields or key[:-1] == ("model", "lora")
    if answer is not None and (answer.kind == "keys" or is_theirs):
        return str(answer)
    hint = suggest_name(name, siblings)
    elsewhere = [dotted_name(other) for other in _iter_keys(RunConfig) if other[-1] == name]
    # At the top the block is missing; in a block a misspelt key of it is likelier.
    if elsewhere and (len(key) == 1 or not hint.startswith("did you mean")):
        return f"did you mean '{elsewhere[0]}'?"
    return hint


def _section_fields(model: type[BaseModel], key: KeyPath) -> dict[str, Any]:
    """Return the fields of the section that `key` names."""
    for name in key:
        if isinstance(name, int) or name not in model.model_fields:
            continue
        found = _find_section(model.model_fields[name].annotation)
        if found is None:
            return {}
        model = found
    return dict(model.model_fields)


def _find_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if (found := _find_section(part)) is not None:
            return found
    return None


def _iter_keys(model: type[BaseModel], parent: KeyPath = ()) -> Iterator[KeyPath]:
    for name, info in model.model_fields.items():
        yield (*parent, name)
        section = _find_section(info.annotation)
        if section is not None:
            yield from _iter_keys(section, (*parent, name))


def _bool_faults(raw: Any, parsed: Any, key: KeyPath, source: SourceMap) -> Iterator[Fault]:
    """Yield a fault for each true or false that pydantic took for the number 1 or 0."""
    if isinstance(raw, bool) and isinstance(parsed, (int, float)) and not isinstance(parsed, bool):
        yield Fault(source.get_location(key), f"must be a number, got {raw!r}", "correct the value")
    elif isinstance(raw, dict) and isinstance(parsed, dict):
        for name, value in raw.items():
            yield from _bool_faults(value, parsed.get(name), (*key, name), source)
    elif isinstance(raw, list) and isinstance(parsed, (list, tuple)):
        for index, (value, taken) in enumerate(zip(raw, parsed, strict=False)):
            yield from _bool_faults(value, taken, (*key, index), source)


def _password_faults(value: Any, key: KeyPath, source: SourceMap) -> Iterator[Fault]:
    """Yield a fault for each URL with a password: recipes are saved in run folders and sent to trackers."""
    if isinstance(value, str) and URL_PASSWORD.search(value):
        problem = "holds a URL with a password, and recipes are saved"
        yield Fault(source.get_location(key), problem, "remove the password, and give it where the service reads it")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _password_faults(inner, (*key, name), source)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _password_faults(inner, (*key, index), source)


EXCLUSIVE_KEYS: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("steps",), ("epochs",)),
    (("data", "eval"), ("data", "eval_fraction")),
    (("model", "path"), ("model", "config")),
    (("batch", "tokens_per_micro"), ("batch", "accumulate")),
)
"""Pairs of mutually exclusive keys."""

BATCH_KEYS: tuple[KeyPath, ...] = (("batch", "accumulate"), ("batch", "micro"), ("batch", "total"))
"""Two of them determine the third. The first in this order that comes from the file is dropped, so that the batch of a
step and its memory stay."""


def resolve_overrides(source: SourceMap) -> None:
    """Drop keys of the file that exclude a key of the command line, whose own keys stay.

    Conflicts within one source are left to `check_cross_fields` and `resolve_batch`, which report them.
    """
    for pair in EXCLUSIVE_KEYS:
        for key, other in (pair, pair[::-1]):
            is_set = bool(lookup(source.values, key)) and _is_from_command_line(source, key)
            if not is_set or _is_from_command_line(source, other):
                continue
            _drop_key(source, other)
            tokenizer = ("model", "tokenizer")
            is_trained = isinstance(lookup(source.values, tokenizer), dict)  # for a model from scratch
            if key == ("model", "path") and is_trained and not _is_from_command_line(source, tokenizer):
                _drop_key(source, tokenizer)
    if all(lookup(source.values, key) for key in BATCH_KEYS):
        # With accumulate alone on the command line it is unclear which of the others should change, so all three stay.
        new = [key for key in BATCH_KEYS if _is_from_command_line(source, key)]
        old = [key for key in BATCH_KEYS if key not in new]
        if new and old and new != [BATCH_KEYS[0]]:
            _drop_key(source, old[0])


def _is_from_command_line(source: SourceMap, key: KeyPath) -> bool:
    """Return True where the command line set the key, or a block that contains it."""
    return any(source.locations.get(key[:end]) == COMMAND_LINE for end in range(len(key), 0, -1))


def _drop_key(source: SourceMap, key: KeyPath) -> None:
    block = lookup(source.values, key[:-1])
    if isinstance(block, dict):
        block.pop(key[-1], None)
        source.locations = {place: text for place, text in source.locations.items() if place[: len(key)] != key}
