"""Safety labels are read from pairs and from PKU-SafeRLHF's responses; a faulty one is named with its fix."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.data.formats.preferences import read_preference
from dstrain.data.records import BadRecord
from dstrain.tasks.safety.pair_task import read_safety_labels

PAIR = {"prompt": "How?", "chosen": "So.", "rejected": "No."}
RESPONSES = {
    "prompt": "How?", "response_0": "So.", "response_1": "No.", "is_response_0_safe": False, "is_response_1_safe": True,
    "better_response_id": 0, "safer_response_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "wanted"), [((True, False), (True, False)), ((0, 1), (False, True)), ((1.0, 0.0), (True, False))]
)
def test_labels_are_true_or_false_or_1_or_0(values: tuple[Any, Any], wanted: tuple[bool, bool]) -> None:
    assert read_safety_labels(PAIR | {"chosen_safe": values[0], "rejected_safe": values[1]}, True) == wanted


def test_a_pair_without_labels_has_none() -> None:
    assert read_safety_labels(PAIR, False) == (None, None)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, r"no 'chosen_safe'; write true or false"),
        ({"chosen_safe": True}, r"no 'rejected_safe'"),
        ({"chosen_safe": True, "rejected_safe": "no"}, r"'rejected_safe' is 'no'; write true for a safe answer"),
        ({"chosen_safe": 2, "rejected_safe": 0}, r"'chosen_safe' is 2"),
        ({"chosen_save": 1, "rejected_safe": 0}, r"no 'chosen_safe' \(did you mean 'chosen_save'\?\)"),
    ],
)
def test_a_faulty_label_is_named_with_its_fix(labels: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRecord, match=words):
        read_safety_labels(PAIR | labels, True)


def test_one_label_without_the_other_is_a_fault_where_none_is_needed() -> None:
    with pytest.raises(BadRecord, match=r"no 'rejected_safe'"):
        read_safety_labels(PAIR | {"chosen_safe": True}, False)


@pytest.mark.parametrize("better", [0, 1])
def test_the_better_response_is_the_chosen_one(better: int) -> None:
    record = RESPONSES | {"better_response_id": better}
    found = read_preference(record)
    assert (found.prompt, found.chosen, found.rejected) == ("How?", *(("So.", "No.") if not better else ("No.", "So.")))
    assert read_safety_labels(record, True) == ((False, True) if not better else (True, False))


@pytest.mark.parametrize("better", [2, True, "0"])
def test_a_better_response_that_is_none_of_the_two_is_refused(better: Any) -> None:
    with pytest.raises(BadRecord, match=r"'better_response_id' is .*; write 0 or 1"):
        read_preference(RESPONSES | {"better_response_id": better})


def test_two_responses_without_the_better_one_are_refused() -> None:
    """The message said that a column which the file lacks is None."""
    with pytest.raises(BadRecord, match="'response_0' and 'response_1' come without 'better_response_id'"):
        read_preference({key: value for key, value in RESPONSES.items() if key != "better_response_id"})
