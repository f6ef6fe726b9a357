"""Options of a task: their types and help texts, and the validation of a recipe's values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dstrain.config.schema import RunConfig
from dstrain.errors import Fault, TaskError, suggest_name
from dstrain.tasks.common.task import Task


@dataclass(frozen=True)
class Option:
    """Option of a task, for help texts."""

    name: str
    type: str
    default: Any
    help: str
    nested: tuple[Option, ...] = ()
    """Options of a block, where the option is one: `options: {safety: {delta: 5}}`."""


def get_option_fields(task: type[Task]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a task that are options: all but those of `Task` itself."""
    inherited = {field.name for field in dataclasses.fields(Task)}
    return [field for field in dataclasses.fields(task) if field.name not in inherited]


def task_options(task: type[Task]) -> list[Option]:
    """Return the task's options with the strings under its fields as help."""
    return _describe_options(task, get_option_fields(task))


def _describe_options(owner: type, fields: Sequence[dataclasses.Field[Any]]) -> list[Option]:
    helps: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        if dataclasses.is_dataclass(cls) and cls is not Task:
            helps.update(_field_docstrings(cls))
    types = _option_types(owner)
    described = []
    for field in fields:
        name = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        default = None if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:  # a block of options with their own defaults
            default = {}
        block = _find_block(types[field.name])
        nested = () if block is None else tuple(_describe_options(block, dataclasses.fields(block)))
        described.append(Option(field.name, name, default, helps.get(field.name, ""), nested))
    return described


def _option_types(owner: type) -> dict[str, Any]:
    """Return the evaluated annotation of each option of a task, or of a block of options."""
    types: dict[str, Any] = {}
    for cls in reversed(owner.__mro__):
        if dataclasses.is_dataclass(cls) and cls is not Task:
            types.update(inspect.get_annotations(cls, eval_str=True))
    return types


def _find_block(annotation: Any) -> Any:
    """Return the dataclass of an option that is a block of options, or None where it may be left out; else None."""
    return next((one for one in (annotation, *get_args(annotation)) if dataclasses.is_dataclass(one)), None)


def _field_docstrings(cls: type) -> dict[str, str]:
    """Return the string literal under each field, by the field's name."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def validate_options(task: type[Task], recipe: RunConfig) -> dict[str, Any]:
    """Return the recipe's options, each of its field's type. Raises TaskError with every fault."""
    faults: list[Fault] = []
    fields = _OptionFields("options", f"task {recipe.task}", [field.name for field in get_option_fields(task)], faults)
    values = fields.validate(_option_types(task), recipe.options)
    if faults:
        raise TaskError(faults)
    return values


@dataclass(frozen=True)
class _OptionFields:
    """Fields of a task or of a block of options, and the faults found in their values."""

    place: str
    """Dotted key of the block."""
    owner: str
    names: Sequence[str]
    faults: list[Fault]

    def validate(self, types: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values without faults, each of its type; add a fault for each of the others."""
        values = {}
        for name, value in given.items():
            if name not in self.names:
                near = suggest_name(str(name), self.names)
                self.faults.append(Fault(f"{self.place}.{name}", f"is not an option of {self.owner}", near))
                continue
            block = _find_block(types[name])
            if block is not None and isinstance(value, Mapping):
                values[name] = self._read_block(name, block, value)
            elif (problem := _check_value(types[name], value, values, name)) is not None:
                fix = f"write {name}: {{…}}" if block is not None else "correct it"
                self.faults.append(Fault(f"{self.place}.{name}", f"is {value!r}, but {problem}", fix))
        return values

    def _read_block(self, name: str, block: Any, given: Mapping[str, Any]) -> Any:
        """Return the block as its dataclass, None if it has a fault."""
        place, known = f"{self.place}.{name}", [field.name for field in dataclasses.fields(block)]
        before = len(self.faults)
        values = _OptionFields(place, place, known, self.faults).validate(_option_types(block), given)
        if len(self.faults) > before:
            return None
        try:
            return block(**values)
        except (TypeError, ValueError) as error:
            self.faults.append(Fault(place, str(error), ""))
            return None


def _check_value(annotation: Any, value: Any, values: dict[str, Any], name: str) -> str | None:
    """Put the value of its type into `values`; return what is wrong with it, None if nothing."""
    if _find_block(annotation) is not None:
        if value is None and type(None) in get_args(annotation):
            values[name] = None
            return None
        return "input should be a block of options"
    try:
        read = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        problem = str(error.errors()[0]["msg"])
        return problem[0].lower() + problem[1:]
    if isinstance(value, bool) and isinstance(read, (int, float)) and not isinstance(read, bool):
        return "input should be a number"
    values[name] = read
    return None
