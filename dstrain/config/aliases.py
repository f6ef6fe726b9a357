"""What the keys of other trainers are here: TRL, HF Trainer, LLaMA-Factory, axolotl, ms-swift, align-anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dstrain.source_map import KeyPath

LOSS_TYPES = ("ipo", "orpo", "simpo")
"""Methods of other trainers that are a loss_type of task dpo."""
DATASET_BLOCKS = frozenset(("datasets", "test_datasets", "pretraining_dataset"))
"""Axolotl's and TRL's lists of data sets, whose keys are `datasets.NAME` in the table."""


KINDS = ("keys", "not needed because", "not supported", "not supported, without effect on what is learnt")


class Answer(NamedTuple):
    """What a key of another trainer is here."""

    kind: str
    """One of KINDS."""
    text: str
    """The recipe key or option; the reason."""

    def __str__(self) -> str:
        if self.kind == "keys":
            return f"here it is {self.text}"
        return f"{self.kind} {self.text}" if self.kind.endswith("because") else f"not supported ({self.text})"


@cache
def read_aliases() -> dict[str, Answer]:
    """Return name -> answer; a name with a * stands for all that fit it."""
    table = read_table()
    return {name: Answer(kind, text) for kind in KINDS for text, names in table[kind].items() for name in names}


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
    if (task := find_value("task", name)) is not None:
        return f"here it is {task}"
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
