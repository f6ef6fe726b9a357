"""Keys that exclude each other: one that the command line sets takes the place of what the file says."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.config.read_yaml import COMMAND_LINE
from dstrain.source_map import KeyPath, SourceMap, lookup

EXCLUSIVE_KEYS: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("steps",), ("epochs",)),
    (("data", "eval"), ("data", "eval_fraction")),
    (("model", "path"), ("model", "config")),
)
"""Pairs of which a recipe has one."""

BATCH_KEYS: tuple[KeyPath, ...] = (("batch", "accumulate"), ("batch", "micro"), ("batch", "total"))
"""Two of them give the third. The first in this order that the file wrote gives way: what a step learns from, and the
memory that it takes, stay."""


def resolve_overrides(source: SourceMap) -> None:
    """Drop what the file says where the command line sets a key that excludes it; what the command line itself says stays.

    What stands there twice all the same is left for the rules to refuse (`cross_field_faults`, `resolve_batch`).
    """
    for pair in EXCLUSIVE_KEYS:
        for key, other in (pair, pair[::-1]):
            if _is_overridden(source, key, other):
                _drop_key(source, other)
                if key == ("model", "path"):
                    _drop_trained_tokenizer(source)
    _resolve_batch_override(source)


def _is_overridden(source: SourceMap, key: KeyPath, other: KeyPath) -> bool:
    return (
        bool(lookup(source.values, key))
        and _is_from_command_line(source, key)
        and not _is_from_command_line(source, other)
    )


def _is_from_command_line(source: SourceMap, key: KeyPath) -> bool:
    """Whether the command line set the key, or a block with it."""
    return any(source.locations.get(key[:end]) == COMMAND_LINE for end in range(len(key), 0, -1))


def _drop_key(source: SourceMap, key: KeyPath) -> None:
    block = lookup(source.values, key[:-1])
    if isinstance(block, dict):
        block.pop(key[-1], None)
        source.locations = {place: text for place, text in source.locations.items() if place[: len(key)] != key}


def _drop_trained_tokenizer(source: SourceMap) -> None:
    """One that is trained for a model from scratch does not fit weights that are loaded."""
    key = ("model", "tokenizer")
    if isinstance(lookup(source.values, key), dict) and not _is_from_command_line(source, key):
        _drop_key(source, key)


def _resolve_batch_override(source: SourceMap) -> None:
    """Where all three stand there, drop accumulate, or what the command line left of the file's.

    With accumulate alone on the command line nothing says which of the other two is meant to change: all three stay.
    """
    if not all(lookup(source.values, key) for key in BATCH_KEYS):
        return
    new = [key for key in BATCH_KEYS if _is_from_command_line(source, key)]
    old: Sequence[KeyPath] = [key for key in BATCH_KEYS if key not in new]
    if new and old and new != [BATCH_KEYS[0]]:
        _drop_key(source, old[0])
