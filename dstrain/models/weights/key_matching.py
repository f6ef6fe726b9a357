"""Which name in a file of weights is which of a model's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

COMPILED = "_orig_mod"
"""The word that torch.compile puts into names."""
WRAPPED = "module"
"""The word that DistributedDataParallel and DataParallel put before names."""


def matched_names(names: Collection[str], known: Mapping[str, str], base: str) -> dict[str, str]:
    """File's name -> model's name, in the one way of reading all names that reaches most weights; the plainest of equals.

    `known`: every name in the model -> the first name of that tensor, which tied ones share. `base`: the name of the
    part that transformers calls the base model. Names that the model has not are in the answer too.
    """

    def reached(renamed: Mapping[str, str]) -> int:
        return len({known[name] for name in renamed.values() if name in known})

    return max(_ways(names, known, f"{base}."), key=reached)


def _ways(names: Collection[str], known: Mapping[str, str], base: str) -> Iterator[dict[str, str]]:
    """The plainest first: as they are, then without 1, 2, ... wrappers; each also with `base` put before or taken off."""
    deepest = max((_depth(_uncompiled(name)) for name in names), default=0)
    for way in range(-1, deepest + 1):
        plain = {name: name if way < 0 else _unwrapped(_uncompiled(name), way) for name in names}
        yield plain
        if base != ".":
            yield {name: base + short if base + short in known else short for name, short in plain.items()}
            yield {name: short.removeprefix(base) for name, short in plain.items()}


def _uncompiled(name: str) -> list[str]:
    return [word for word in name.split(".") if word != COMPILED]


def _depth(words: list[str]) -> int:
    """How many wrappers the name is in."""
    return next((index for index, word in enumerate(words) if word != WRAPPED), 0)


def _unwrapped(words: list[str], wrappers: int) -> str:
    return ".".join(words[min(wrappers, _depth(words)) :])


def change(name: str, target: str) -> tuple[str, str]:
    """What is taken off a name, and what put there, to make the other: `module.a.b`, `a.b` -> (`module.`, "")."""
    one, other = name.split("."), target.split(".")
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    return "".join(f"{word}." for word in one), "".join(f"{word}." for word in other)
