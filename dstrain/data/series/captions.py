"""Patterns of curves that captions name."""

from __future__ import annotations

import re
from collections.abc import Iterable

PATTERN_WORDS: dict[str, str] = {
    "peak": r"peak\w*|pea?ks?|spik\w*|hump\w*|bump\w*|mound\w*|highest|high point|maximum|max|tops?|crest\w*|hill|apex\w*|"
    r"climax\w*|pinnacle|summit",
    "dip": r"dip\w*|trou?gh\w*|troo\w*|lowest|low point|minimum|min|bottom\w*|valley\w*|dents?",
    "plateau": r"plat\w*|pleat\w*|flat\w*|level\w*|constant\w*|stable|stagna\w*|unchang\w*|unwavering|consistent|"
    r"maintain\w*|(?:stays?|remains?|remaining|is|mostly) (?:\w+ )?(?:the same|steady|same)|(?:does not|no) change|"
    r"stabili[sz]\w*|same (?:value|level|place|point)",
    "up": r"incr\w*|ris(?:e|es|ing)|rose|rais\w*|grow\w*|climb\w*|up(?:wards?|hill|turn|rising|swing|s)?|gain\w*|"
    r"ascen\w*|inclin\w*|jumps?|goes up|going up|soar\w*|surg\w*|hikes?|higher|greater|recover\w*|rebound\w*|"
    r"positive slope|slopes? positive\w*",
    "down": r"decr\w*|desc?re\w*|decea\w*|declin\w*|fall\w*|fell|drop\w*|down(?:wards?|hill|turn|swing|s)?|descen\w*|"
    r"slump\w*|loss|plummet\w*|plung\w*|dives?|reduc\w*|deteriorat\w*|degrad\w*|sink\w*|lowers?|less|crash\w*|"
    r"collaps\w*|tails? off|tailing off|negative slope|slopes? negative\w*",
    "periodic": r"periodic\w*|oscillat\w*|repeat\w*|cycl\w*|waves?|seasonal\w*|fluctuat\w*|zig ?zag\w*|volatile",
    "anomaly": r"anomal\w*|outlier\w*|sudden jump|unusual\w*",
}
"""Pattern -> regular expression of the words that name it, as people write and misspell them."""
ALONE = {"plateau": r"stead\w*|even(?:ly)?|straight|similar|sideways"}
"""The same, for words that name a pattern only in a caption that names no other: `a steady increase` is up."""
_COMPILED = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in PATTERN_WORDS.items()}
_COMPILED_ALONE = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in ALONE.items()}
PATTERNS = tuple(PATTERN_WORDS)


def find_patterns(caption: str) -> frozenset[str]:
    """Return the patterns that a caption names."""
    found = frozenset(name for name, words in _COMPILED.items() if words.search(caption))
    return found or frozenset(name for name, words in _COMPILED_ALONE.items() if words.search(caption))


def names_right_pattern(caption: str, references: Iterable[str]) -> float:
    """Return 1 where the caption names patterns and a reference names each of them, else 0.

    A curve has several true captions, each about another part of it; so any reference may name a pattern. Where no
    reference names one, a caption is right if it names none.
    """
    found = find_patterns(caption)
    known = frozenset().union(*map(find_patterns, references))
    return float(found == known) if not known else float(bool(found) and found <= known)
