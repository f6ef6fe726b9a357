"""Patterns of curves that captions name."""

from __future__ import annotations

import re
from collections.abc import Iterable

PATTERN_WORDS: dict[str, str] = {
    "peak": r"peak\w*|spik\w*|hump\w*|highest|maximum|max|tops?|crest\w*|hill",
    "dip": r"dip\w*|trough\w*|lowest|minimum|min|bottom\w*|valley\w*|dents?",
    "plateau": r"plateau\w*|flat\w*|level\w*|constant\w*|stable|stagnant|unchang\w*|consistent|maintain\w*|"
    r"(?:stays?|remains?|remaining|is|mostly) (?:\w+ )?(?:the same|steady|same)|does not change|stabili[sz]\w*",
    "up": r"increas\w*|ris(?:e|es|ing)|rose|grow\w*|climb\w*|upwards?|gain\w*|ascend\w*|inclin\w*|jumps?|goes up|going up|up",
    "down": r"decreas\w*|declin\w*|fall\w*|fell|drop\w*|downwards?|descend\w*|slump\w*|goes down|going down|down|loss|"
    r"plummet\w*|dives?|reduc\w*|deteriorat\w*",
    "periodic": r"periodic\w*|oscillat\w*|repeat\w*|cycl\w*|waves?|seasonal\w*|fluctuat\w*|zig ?zag\w*|volatile",
    "anomaly": r"anomal\w*|outlier\w*|sudden jump|unusual\w*",
}
"""Pattern -> regular expression of the words that name it."""
_COMPILED = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in PATTERN_WORDS.items()}
PATTERNS = tuple(PATTERN_WORDS)


def find_patterns(caption: str) -> frozenset[str]:
    """Return the patterns that a caption names."""
    return frozenset(name for name, words in _COMPILED.items() if words.search(caption))


def names_right_pattern(caption: str, references: Iterable[str]) -> float:
    """Return 1 where the caption names patterns and a reference names each of them, else 0.

    A curve has several true captions, each about another part of it; so any reference may name a pattern. Where no
    reference names one, a caption is right if it names none.
    """
    found = find_patterns(caption)
    known = frozenset().union(*map(find_patterns, references))
    return float(found == known) if not known else float(bool(found) and found <= known)
