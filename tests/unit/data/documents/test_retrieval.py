from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dstrain.data.documents.pages import PageIndex, tokenize_words
from dstrain.errors import DataError
from tests.unit.data.documents.pdf_files import PAGES


def test_words_are_numbers_and_letters_in_lower_case() -> None:
    assert tokenize_words("Total: RM 3,490.50 für ÄÖ_x") == ["total", "rm", "3", "490", "50", "für", "äö", "x"]


def test_scripts_without_spaces_are_split_into_characters() -> None:
    assert tokenize_words("合計は1,200円") == ["合", "計", "は", "1", "200", "円"]


def test_the_page_with_the_rarest_words_comes_first() -> None:
    index = PageIndex(PAGES)
    assert index.rank("How much is the RENT?")[0] == 2
    assert index.rank("Pets allowed?") == [3]


def test_equal_pages_are_ranked_by_number() -> None:
    index = PageIndex(["blue sky", "red sky", "red sky", "red sky"])
    assert index.rank("red") == [2, 3, 4]


def test_a_word_on_every_page_still_counts() -> None:
    """Robertson's weight of such a word is negative, and would rank pages without it first."""
    assert PageIndex(["total", "total total total", "total other words"]).rank("total") == [2, 1, 3]


def test_a_question_that_shares_no_word_ranks_no_page() -> None:
    assert PageIndex(PAGES).rank("Wieviel?") == []
    assert PageIndex(PAGES).rank("") == []
    assert not PageIndex(["", " \n"]).has_text
    assert PageIndex(["", "one"]).rank("one") == [2]


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    question = "when does the tenant pay the rent of the house in March"
    code = "import sys; from dstrain.data.documents.pages import PageIndex; "
    code += "print(PageIndex(sys.argv[2:]).rank(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", code, question, *PAGES * 3],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str(PageIndex(PAGES * 3).rank(question))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(DataError, match=r"needs bm25s; run pip install \"dstrain\[docqa\]\""):
        PageIndex(PAGES).rank("rent")
