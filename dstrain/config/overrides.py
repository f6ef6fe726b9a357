"""Keys that exclude each other: one that the command line sets takes the place of what the file says."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.config.source_map import Key, Written, lookup

FROM_COMMAND_LINE = "--set"
"""What `Written.places` says of a key that --set wrote."""

EXCLUSIVE: tuple[tuple[Key, Key], ...] = (
    (("steps",), ("epochs",)),
    (("data", "eval"), ("data", "eval_fraction")),
    (("model", "path"), ("model", "config")),
)
"""Pairs of which a recipe has one."""

BATCH: tuple[Key, ...] = (("batch", "accumulate"), ("batch", "micro"), ("batch", "total"))
"""Two of them give the third. The first in this order that the file wrote gives way: what a step learns from, and the
memory that it takes, stay."""


def settle_overrides(written: Written) -> None:
    """Drop what the file says where the command line sets a key that excludes it; what the command line itself says stays.

    What stands there twice all the same is left for the rules to refuse (`cross_field_faults`, `resolve_batch`).
    """
    for pair in EXCLUSIVE:
        for key, other in (pair, pair[::-1]):
            if _is_overridden(written, key, other):
                _drop(written, other)
                if key == ("model", "path"):
                    _drop_trained_tokenizer(written)
    _settle_batch(written)


def _is_overridden(written: Written, key: Key, other: Key) -> bool:
    return bool(lookup(written.values, key)) and _is_new(written, key) and not _is_new(written, other)


def _is_new(written: Written, key: Key) -> bool:
    """Whether the command line set the key, or a block with it."""
    return any(written.places.get(key[:end]) == FROM_COMMAND_LINE for end in range(len(key), 0, -1))


def _drop(written: Written, key: Key) -> None:
    block = lookup(written.values, key[:-1])
    if isinstance(block, dict):
        block.pop(key[-1], None)
        written.places = {place: text for place, text in written.places.items() if place[: len(key)] != key}


def _drop_trained_tokenizer(written: Written) -> None:
    """One that is trained for a model from scratch does not fit weights that are loaded."""
    key = ("model", "tokenizer")
    if isinstance(lookup(written.values, key), dict) and not _is_new(written, key):
        _drop(written, key)


def _settle_batch(written: Written) -> None:
    """Where all three stand there, drop accumulate, or what the command line left of the file's.

    With accumulate alone on the command line nothing says which of the other two is meant to change: all three stay.
    """
    if not all(lookup(written.values, key) for key in BATCH):
        return
    new = [key for key in BATCH if _is_new(written, key)]
    old: Sequence[Key] = [key for key in BATCH if key not in new]
    if new and old and new != [BATCH[0]]:
        _drop(written, old[0])
