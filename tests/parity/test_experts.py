"""Ranks whose tokens go to different experts take the step of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cells import SLOW
from tests.model_families import family
from tests.parity.test_step import SGD, distance
from tests.workers import Workers

SAMPLES = [1, 2, 3, 4]
USED = {1: 0, 3: 2}
"""First sample of a micro-batch -> the first of its two experts, of four: the ranks have none in common."""
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"model": {"config": family("mixtral")}},
    "mixtral, padded rows": {"model": {"config": family("mixtral")}, "batch": {"packing": False}},
    "olmoe, checkpointed": {"model": {"config": family("olmoe"), "gradient_checkpointing": True}},
    "gpt_oss": {"model": {"config": family("gpt_oss")}},
    "lora on experts, mixtral": {"model": {"config": family("mixtral"), "lora": {"rank": 4, "targets": ["gate_up_proj", "down_proj", "q_proj"]}}},
}  # fmt: skip
QUICK = {("mixtral", 3, "grouped_mm"), ("gpt_oss", 2, "eager"), ("lora on experts, mixtral", 3, "grouped_mm")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stage", "implementation"),
    [
        cell if cell in QUICK else SLOW(*cell)
        for case in CASES
        for stage in range(4)
        for implementation in ("eager", "grouped_mm", "batched_mm")
        for cell in [(case, stage, implementation)]
    ],
)
def test_ranks_with_other_experts_take_the_step_of_one_process(
    case: str, stage: int, implementation: str, one: Workers, two: Workers
) -> None:
    changes = {**CASES[case], **SGD, "moved": True}
    given = {"used": USED, "task": "sft", "samples": SAMPLES, "changes": changes}
    (wanted,) = one("tests.parity.expert_cases:step", kind="torch", accumulate=2, implementation="eager", **given)
    assert all(wanted["tokens"])
    first, second = two(
        "tests.parity.expert_cases:step", kind=f"zero{stage}", accumulate=1, implementation=implementation, **given
    )
    assert [bool(count) for count in first["tokens"]] == [True, True, False, False]
    assert [bool(count) for count in second["tokens"]] == [False, False, True, True]
    for found in (first, second):
        assert distance(found, wanted, "before") == 0
        assert found["sums"] == pytest.approx(wanted["sums"], rel=2e-6, abs=1e-5)
        assert distance(found, wanted) <= 1e-6
