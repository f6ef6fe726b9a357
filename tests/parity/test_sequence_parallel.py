"""One step is one step whether one process computes the tokens of a micro-batch, or several share them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.cells import SLOW
from tests.model_families import family
from tests.parity.test_packing import PACKED, check_equal
from tests.parity.test_step import SGD
from tests.workers import Workers

SAMPLES = [5, 0, 9, 13, 2, 14, 7]
LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}


def of(name: str, **model: Any) -> dict[str, Any]:
    return {"model": {"config": family(name), **model}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "rm": ("rm", {"moved": True}),
    "dpo": ("dpo", {"moved": True}),
    "dpo, adapters": ("dpo", {"moved": True, **LORA}),
    "dpo, a reference remembered": ("dpo", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    "orpo": ("dpo", {"options": {"loss_type": "orpo"}}),
    "kto": ("kto", {"moved": True, "seed": 6}),
    "distill": ("distill", {"moved": True, "options": {"precompute_ref_log_probs": True}}),
    **{f"{task}, with images": (f"{task}, with images", {"moved": True}) for task in ("vlm", "rm", "dpo")},
    **{name: ("sft", of(name)) for name in ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "granite")},
}


QUICK = (("sft", 3), ("dpo, adapters", 1), ("rm, with images", 3), ("kto", 0))
"""Cases and stages that stand for the others: gemma2 has the attention of sft; kto for distill, whose losses are sums of answers too."""
QUICK_BY_FOUR = (("dpo", 3, 2), ("sft", 0, 4))


def step(workers: Workers, case: str, stage: int, sequence: int, accumulate: int = 2) -> list[dict[str, Any]]:
    task, changes = CASES[case]
    return workers(
        "tests.parity.cases:one_step", task=task, kind=f"zero{stage}", samples=SAMPLES, accumulate=accumulate,
        changes=changes | SGD | PACKED | {"parallel": {"sequence": sequence}},
    )  # fmt: skip


@pytest.mark.parametrize(("case", "stage"), [one if one in QUICK else SLOW(*one) for one in product(CASES, range(4))])
def test_two_processes_share_the_tokens_of_a_step(case: str, stage: int, two: Workers, definition: Any) -> None:
    for found in step(two, case, stage, 2):
        check_equal(found, definition(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stage", "sequence"),
    [
        one if one in QUICK_BY_FOUR else SLOW(*one)
        for one in (
            (case, stage, sequence)
            for case in ("sft", "dpo", "rm, with images", "gemma2", "kto")
            for stage, sequence in ((0, 4), (3, 2), (3, 4))
        )
    ],
)
def test_four_processes_share_them_in_one_group_or_two(
    case: str, stage: int, sequence: int, four: Workers, definition: Any
) -> None:
    """With four, each process has a copy of a key-value head that two of them read."""
    for found in step(four, case, stage, sequence):
        check_equal(found, definition(case))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "stage"), [("sft", 3), SLOW("dpo, with images", 2)])
def test_a_process_may_have_no_target_and_no_image(case: str, stage: int, four: Workers, definition: Any) -> None:
    """One sample in each pass: its answer, and its images, are in the part of one process."""
    for found in step(four, case, stage, 4, accumulate=len(SAMPLES)):
        check_equal(found, definition(case))
