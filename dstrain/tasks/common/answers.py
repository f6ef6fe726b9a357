"""Metrics of a short answer against the accepted ones: exact match, relaxed number match, ANLS."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence

ANLS_THRESHOLD = 0.5
"""Normalized distance from which on an answer scores 0."""
RELATIVE_TOLERANCE = 0.05
"""Largest deviation of a matching number, as a share of the accepted one."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CURRENCY_CODES = "AUD|CAD|CHF|CNY|EUR|GBP|HKD|IDR|INR|JPY|KRW|MYR|RM|RMB|RS|SGD|THB|TWD|USD"
_CURRENCY = re.compile(
    rf"[$€£¥₩₹₽฿¢]|\b(?:{_CURRENCY_CODES})(?=[\d\s.,()+-]|$)\.?|(?<=\d)(?:{_CURRENCY_CODES})\b", re.I
)
_GROUPED = {sep: re.compile(rf"\d{{1,3}}(?:{re.escape(sep)}\d{{3}})+") for sep in ",. '"}
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer equals an accepted one after `normalize_text`, else 0.

    Rajpurkar et al. (arXiv 1606.05250), section 6.1.
    """
    return _best(answer, accepted, lambda one, other: float(normalize_text(one) == normalize_text(other)))


def relaxed_number_match(answer: str, accepted: Sequence[str]) -> float:
    """Return 1 if the answer is a number within 5 % of an accepted number, or else an exact match; 0 otherwise.

    The relaxed accuracy of Methani et al. (arXiv 1909.00997) and Masry et al. (arXiv 2203.10244), section 5.1.
    `parse_number` reads numbers. Where one of the two has a percent sign, 12% is 12 and 0.12.
    """
    return _best(answer, accepted, _relaxed_match)


def anls(answer: str, accepted: Sequence[str], threshold: float = ANLS_THRESHOLD) -> float:
    """Return the largest 1 - NL over the accepted answers, 0 where NL is not below the threshold.

    NL is the edit distance divided by the length of the longer text, without regard to case: Biten et al. (arXiv
    1905.13648), eq. 1. The mean over all questions is the average normalized Levenshtein similarity.
    """

    def similarity(one: str, other: str) -> float:
        one, other = (" ".join(text.lower().split()) for text in (one, other))
        distance = edit_distance(one, other) / max(len(one), len(other), 1)
        return 1 - distance if distance < threshold else 0.0

    return _best(answer, accepted, similarity)


ANSWER_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "relaxed_number_match": relaxed_number_match,
    "anls": anls,
}
"""Name -> (answer, accepted answers) -> a score from 0 to 1."""


def normalize_text(text: str) -> str:
    """Return the text in lower case, without punctuation, without a, an and the, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def parse_number(text: str) -> tuple[float, bool] | None:
    """Return the number that the text is, and whether it has a percent sign; None for any other text.

    Currency signs and codes are ignored; (12) is -12. A comma, point, space or apostrophe before groups of three
    digits separates thousands; of a comma and a point the last is the decimal mark; 1.234 has a decimal point.
    """
    body = _CURRENCY.sub("", text).strip().replace("\u2212", "-").replace("\u00a0", " ").replace("\u2019", "'")
    is_percent = body.endswith("%")
    body = body.removesuffix("%").strip()
    if body.startswith("(") and body.endswith(")"):
        body = "-" + body[1:-1].strip()
    sign, digits = (body[:1], body[1:].strip()) if body[:1] in ("+", "-") else ("", body)
    plain = sign + _remove_separators(digits)
    if not _NUMBER.fullmatch(plain) or not math.isfinite(number := float(plain)):
        return None
    return number, is_percent


def _remove_separators(digits: str) -> str:
    """Return the digits without separators of thousands, with a decimal point."""
    whole, mark, decimals = digits, "", ""
    if "," in digits and "." in digits:
        mark = max(",.", key=digits.rfind)
        whole, _, decimals = digits.rpartition(mark)
    elif digits.count(",") == 1 and not _GROUPED[","].fullmatch(digits):
        whole, mark, decimals = digits.partition(",")
    elif digits.count(".") == 1:
        whole, mark, decimals = digits.partition(".")
    for separator, pattern in _GROUPED.items():
        if pattern.fullmatch(whole):
            whole = whole.replace(separator, "")
    return whole + ("." if mark else "") + decimals


def _relaxed_match(answer: str, accepted: str) -> float:
    found, wanted = parse_number(answer), parse_number(accepted)
    if found is None or wanted is None:
        return float(normalize_text(answer) == normalize_text(accepted))
    (number, is_percent), (target, target_is_percent) = found, wanted
    readings = [number] if is_percent == target_is_percent else [number, number / 100 if is_percent else number * 100]
    # The margin is for rounding: 1.05 is within 5 % of 1.
    return float(any(abs(one - target) <= RELATIVE_TOLERANCE * abs(target) * (1 + 1e-9) for one in readings))


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and substitutions of characters."""
    previous = list(range(len(other) + 1))
    for row, char in enumerate(one, 1):
        current = [row]
        for column, compared in enumerate(other, 1):
            substituted = previous[column - 1] + (char != compared)
            current.append(min(previous[column] + 1, current[-1] + 1, substituted))
        previous = current
    return previous[-1]


def _best(answer: str, accepted: Sequence[str], score: Callable[[str, str], float]) -> float:
    return max((score(answer, one) for one in accepted), default=0.0)
