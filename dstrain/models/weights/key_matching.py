"""Which name in a file of weights is which of a model's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

COMPILE_PREFIX = "_orig_mod"
"""The word that torch.compile puts into names."""
WRAPPER_PREFIX = "module"
"""The word that DistributedDataParallel and DataParallel put before names."""


def match_keys(keys: Collection[str], canonical_keys: Mapping[str, str], base_prefix: str) -> dict[str, str]:
    """File's name -> model's name, in the one way of reading all names that reaches most weights; the plainest of equals.

    `known`: every name in the model -> the first name of that tensor, which tied ones share. `base`: the name of the
    part that transformers calls the base model. Names that the model has not are in the answer too.
    """

    def count_matches(key_map: Mapping[str, str]) -> int:
        return len({canonical_keys[name] for name in key_map.values() if name in canonical_keys})

    return max(_iter_key_maps(keys, canonical_keys, f"{base_prefix}."), key=count_matches)


def _iter_key_maps(
    keys: Collection[str], canonical_keys: Mapping[str, str], base_prefix: str
) -> Iterator[dict[str, str]]:
    """The plainest first: as they are, then without 1, 2, ... wrappers; each also with `base` put before or taken off."""
    deepest = max((_wrapper_depth(_split_key(name)) for name in keys), default=0)
    for way in range(-1, deepest + 1):
        plain = {name: name if way < 0 else _strip_wrappers(_split_key(name), way) for name in keys}
        yield plain
        if base_prefix != ".":
            yield {
                name: base_prefix + short if base_prefix + short in canonical_keys else short
                for name, short in plain.items()
            }
            yield {name: short.removeprefix(base_prefix) for name, short in plain.items()}


def _split_key(key: str) -> list[str]:
    return [word for word in key.split(".") if word != COMPILE_PREFIX]


def _wrapper_depth(parts: list[str]) -> int:
    """How many wrappers the name is in."""
    return next((index for index, word in enumerate(parts) if word != WRAPPER_PREFIX), 0)


def _strip_wrappers(parts: list[str], depth: int) -> str:
    return ".".join(parts[min(depth, _wrapper_depth(parts)) :])


def diff_prefix(key: str, target: str) -> tuple[str, str]:
    """What is taken off a name, and what put there, to make the other: `module.a.b`, `a.b` -> (`module.`, "")."""
    one, other = key.split("."), target.split(".")
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    return "".join(f"{word}." for word in one), "".join(f"{word}." for word in other)
