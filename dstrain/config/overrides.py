"""Precedence of --set over mutually exclusive recipe keys."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.config.read_yaml import COMMAND_LINE
from dstrain.source_map import KeyPath, SourceMap, lookup

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
    """Drop keys of the file that exclude a key of the command line.

    Keys of the command line stay.

    Conflicts within one source are left to `check_cross_fields` and `resolve_batch`, which report them.
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
    """Return True where the command line set the key, or a block that contains it."""
    return any(source.locations.get(key[:end]) == COMMAND_LINE for end in range(len(key), 0, -1))


def _drop_key(source: SourceMap, key: KeyPath) -> None:
    block = lookup(source.values, key[:-1])
    if isinstance(block, dict):
        block.pop(key[-1], None)
        source.locations = {place: text for place, text in source.locations.items() if place[: len(key)] != key}


def _drop_trained_tokenizer(source: SourceMap) -> None:
    """Drop `model.tokenizer: {train: …}`, which is for a model from scratch and does not fit loaded weights."""
    key = ("model", "tokenizer")
    if isinstance(lookup(source.values, key), dict) and not _is_from_command_line(source, key):
        _drop_key(source, key)


def _resolve_batch_override(source: SourceMap) -> None:
    """If all three batch keys are set, drop the first one of BATCH_KEYS that comes from the file.

    With accumulate alone on the command line it is unclear which of the other two should change, so all three stay.
    """
    if not all(lookup(source.values, key) for key in BATCH_KEYS):
        return
    new = [key for key in BATCH_KEYS if _is_from_command_line(source, key)]
    old: Sequence[KeyPath] = [key for key in BATCH_KEYS if key not in new]
    if new and old and new != [BATCH_KEYS[0]]:
        _drop_key(source, old[0])
