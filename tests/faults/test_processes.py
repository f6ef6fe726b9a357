"""A run of a Python script whose processes are killed or stopped: nothing is left, and a resume changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.processes import EXPECTED, Chain, Role, choose_harms


@pytest.mark.slow
def test_nothing_is_left_and_a_resume_is_the_same_run(tmp_path: Path) -> None:
    chain = Chain(tmp_path, random.Random(0))
    harms: list[tuple[str, Role]] = [("SIGKILL", "script"), ("SIGSTOP", "rank 0"), ("SIGKILL", "supervisor")]
    for signal_name, role in harms:
        outcome = chain.harm(signal_name, role)
        assert outcome.wrong == [], outcome
    assert chain.finish() == []


def test_each_kind_of_harm_is_chosen_as_often_as_any_other() -> None:
    harms = choose_harms(2 * len(EXPECTED), random.Random(0))
    assert {harms.count(kind) for kind in EXPECTED} == {2}
