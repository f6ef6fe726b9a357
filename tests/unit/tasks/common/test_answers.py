"""The metrics of answers are the published ones."""

from __future__ import annotations

import pytest

from dstrain.tasks.common.answers import anls, edit_distance, exact_match, parse_number, relaxed_number_match


@pytest.mark.parametrize(
    ("answer", "accepted", "wanted"),
    [
        ("The Denver Broncos", ["Denver Broncos"], 1),  # SQuAD's normalization
        ("  denver   broncos!", ["Denver Broncos"], 1),
        ("Santa Clara, California", ["Levi's Stadium", "santa clara california"], 1),
        ("an apple a day", ["apple day"], 1),
        ("theatre", ["atre"], 0),  # an article is a word
        ("Broncos", ["Denver Broncos"], 0),
        ("1,200.50", ["1200.50"], 1),
        ("Résumé", ["résumé"], 1),
        ("12", ["12.0"], 0),
        ("", ["a"], 1),  # an article alone is nothing after normalization, as in SQuAD's script
    ],
)
def test_exact_match_is_squads(answer: str, accepted: list[str], wanted: float) -> None:
    assert exact_match(answer, accepted) == wanted


@pytest.mark.parametrize(
    ("answer", "accepted", "wanted"),
    [
        ("1.05", "1", 1),
        ("1.0501", "1", 0),
        ("95", "100", 1),
        ("94.9", "100", 0),
        ("-95", "-100", 1),
        ("95", "-100", 0),
        ("0", "0", 1),
        ("0.01", "0", 0),
        ("$1,234.00", "1234", 1),
        ("RM 12.50", "12.5", 1),
        ("12.50RM", "RM12.50", 1),
        ("USD 3", "€3", 1),
        ("1.234,56", "1234.56", 1),
        ("1 234 567", "1,234,567", 1),
        ("3,5", "3.5", 1),
        ("(1,000)", "-1000", 1),
        ("12%", "12", 1),
        ("0.12", "12%", 1),
        ("12 %", "0.12", 1),
        ("12%", "13%", 0),
        ("Nine", "nine.", 1),
        ("nine", "9", 0),
        ("12 apples", "12", 0),
        ("2019-01-02", "2019", 0),
        ("nan", "nan", 1),
        ("inf", "1", 0),
        ("RM", "RM", 1),
    ],
)
def test_a_number_may_deviate_by_five_percent(answer: str, accepted: str, wanted: float) -> None:
    assert relaxed_number_match(answer, ["something else", accepted]) == wanted


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.234", 1.234), ("1,234", 1234), ("1.234.567", 1234567), ("12,34,567", None), ("1e3", 1000), ("+5", 5), (".5", 0.5),
     ("5.", 5), ("- 7", -7), ("−7", -7), ("1'000", 1000), ("1 2", None), ("", None), ("%", None), ("-", None),
     ("1,2,3", None), ("1e999", None), ("٣", 3), ("0,5", 0.5)],
)  # fmt: skip
def test_a_number_is_read_with_its_separators(text: str, number: float | None) -> None:
    assert parse_number(text) == (None if number is None else (number, False))


@pytest.mark.parametrize(
    ("one", "other", "wanted"), [("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("abc", "abc", 0)]
)
def test_edit_distances_are_those_counted_by_hand(one: str, other: str, wanted: int) -> None:
    assert edit_distance(one, other) == edit_distance(other, one) == wanted


@pytest.mark.parametrize(
    ("answer", "accepted", "wanted"),
    [
        ("coca cola", ["Coca-Cola"], 8 / 9),  # one substitution in nine characters
        ("COCA  COLA", ["coca cola"], 1),  # neither case nor repeated spaces count
        ("sitting", ["kitten"], 1 - 3 / 7),
        ("abcd", ["abxy"], 0),  # NL = 0.5 is not below the threshold
        ("abcde", ["abcxy"], 0.6),
        ("bank", ["river", "banks"], 0.8),  # the largest over the accepted answers
        ("", [""], 1),
        ("", ["abc"], 0),
        ("a", [], 0),
    ],
)
def test_anls_is_that_of_st_vqa(answer: str, accepted: list[str], wanted: float) -> None:
    assert anls(answer, accepted) == pytest.approx(wanted)
