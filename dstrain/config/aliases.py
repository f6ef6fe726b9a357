"""What the keys of other trainers are here: TRL, HF Trainer, LLaMA-Factory, axolotl, ms-swift, align-anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dstrain.errors import KeyPath

RECIPES_DIR = Path(__file__).parents[1] / "recipes"
"""Folder of the packaged recipes."""
LOSS_TYPES = ("ipo", "orpo", "simpo")
"""Methods of other trainers that are a loss_type of task dpo."""
DATASET_BLOCKS = frozenset(("datasets", "test_datasets", "pretraining_dataset"))
"""Axolotl's and TRL's lists of data sets, whose keys are `datasets.NAME` in the table."""


KINDS = ("keys", "not needed because", "by value", "not supported", "not supported, without effect on what is learnt")
_VALUE = "VALUE"
"""Stands for a value that is not known."""


class Answer(NamedTuple):
    """What a key of another trainer is here."""

    kind: str
    """One of KINDS."""
    text: str
    """The recipe key or option; the reason."""
    values: tuple[Any, ...] = ()
    """Of kind `by value`: the values that are what is done here."""

    def __str__(self) -> str:
        if self.kind == "keys":
            return f"here it is {self.text}"
        if self.kind == "by value" and self.values:
            same = " or ".join(f"`{str(value).lower()}`" for value in self.values)
            return f"only {same} is supported ({self.text})"
        return f"{self.kind} {self.text}" if self.kind.endswith("because") else f"not supported ({self.text})"

    def for_value(self, value: Any) -> Answer:
        """Return the answer to the key with this value, of another kind than `by value`."""
        if self.kind != "by value":
            return self
        given = value if isinstance(value, list) else [value]
        same = {str(one).lower() for one in self.values}
        is_same = bool(given) and all(str(one).lower() in same for one in given)
        return Answer("not needed because" if is_same else "not supported", self.text)

    def to_option(self, value: str | None, known: Collection[str]) -> str:
        """Return the option of `dstrain train` that sets the key to a value of theirs; empty where there is none.

        `known`: keys of a recipe.
        """
        if self.kind != "keys":
            return ""
        if re.fullmatch(r"--[\w-]+( \w+)?", self.text):
            return self.text if " " in self.text else f"{self.text} {value or _VALUE}"
        text = self.text.partition(", of ")[0]
        for word, between in ((", or ", " or "), (" and ", " ")):
            if word in text:
                options = [self._replace(text=part).to_option(value, known) for part in text.split(word)]
                return between.join(options) if all(options) else ""
        key, _, given = text.partition(" for ")[0].partition(": ")
        if key not in known and not re.fullmatch(r"options(\.\w+)+", key):
            return ""
        if not given and key in read_values():
            given = str(find_value(key, value) or value or _VALUE)
        return f"--set {shlex.quote(f'{key}={given or value or _VALUE}')}"


@cache
def read_aliases() -> dict[str, Answer]:
    """Return name -> answer; a name with a * stands for all that fit it."""
    table = read_table()
    return {
        name: Answer(kind, text, tuple(names[name]) if isinstance(names, dict) else ())
        for kind in KINDS
        for text, names in table[kind].items()
        for name in names
    }


def find_names(key: str) -> list[str]:
    """Return the keys of other trainers that are a key, or a key with a value, of the recipe."""
    names: list[str] = read_table()["keys"][key]
    return names


@cache
def read_values() -> dict[str, dict[str, Any]]:
    """Return recipe key -> value of another trainer, as text in lower case -> value here."""
    return {
        key: {str(theirs).lower(): ours for ours, values in rows.items() for theirs in (ours, *values)}
        for key, rows in read_table()["values"].items()
    }


def find_value(key: str, value: Any) -> Any:
    """Return the value here for another trainer's value of a recipe key; None where there is none."""
    return read_values()[key].get(str(value).lower())


@cache
def read_table() -> dict[str, Any]:
    """Return aliases.yaml."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return table


def describe_method(name: str) -> str | None:
    """Return what another trainer's name of a method is here; None for a name that is none."""
    if name in LOSS_TYPES:
        return f"write dpo, with options.loss_type: {name}"
    recipes = sorted(path.stem for path in RECIPES_DIR.glob("*.yaml") if name in path.stem.split("-")[1:])
    hint = f"recipe {recipes[0]} (`dstrain train {recipes[0]}`)" if recipes else ""
    task = find_value("task", name)
    if task is not None:
        return f"here it is {task}" + (f", or of images the {hint}" if hint else "")
    if hint:
        return f"here it is the {hint}"
    if name in ("ppo", "grpo", "rloo", "gkd", "online_dpo"):
        return "not supported (no generation in the training loop); rounds of DPO are in the recipe iterative-dpo"
    return None


def find_answer(key: KeyPath) -> Answer | None:
    """Return what a key of another trainer is here; None for a key that none of them has."""
    names = [str(name) for name in key if not isinstance(name, int)]
    if len(names) > 1 and names[0] in DATASET_BLOCKS:
        names[0] = "datasets"
    table = read_aliases()
    for start in range(len(names)):
        name = ".".join(names[start:])
        if name in table:
            return table[name]
        for pattern, answer in table.items():
            if "*" in pattern and fnmatchcase(name, pattern):
                return answer
    return None


def iter_foreign_keys(values: Any, key: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys of another trainer's file; those in a block that has no answer as a whole, one by one."""
    items = enumerate(values) if isinstance(values, list) else values.items()
    for name, value in items:
        child, is_item = (*key, name), isinstance(values, list)
        if is_item or name in read_table()["blocks"]:
            inner = value
        elif name in DATASET_BLOCKS and not key:
            yield child
            inner = value if isinstance(value, list) else [value]
        else:
            yield child
            continue
        if isinstance(inner, (dict, list)) and inner:
            yield from iter_foreign_keys(inner, child)
        elif not is_item:
            yield child


def find_trainer(values: Mapping[str, Any]) -> str | None:
    """Return whose configuration the values are."""
    return next(
        (
            trainer
            for trainer, known in read_table()["trainers"].items()
            if any(all(name in values for name in sign.split()) for sign in known["signs"])
        ),
        None,
    )
