"""One step is one step whether one process computes the tokens of a micro-batch, or several share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.model_families import family
from tests.parity.test_packing import PACKED, PADDED, check_equal
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
    **{f"{task}, with images": (f"{task}, with images", {"moved": True}) for task in ("vlm", "rm", "dpo")},
    **{name: ("sft", of(name)) for name in ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "granite")},
}


@pytest.fixture(scope="module")
def four(own_cache: None) -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def definition(one: Workers) -> Any:
    """What plain PyTorch does with all samples in one padded batch."""
    found: dict[str, Any] = {}

    def of(case: str) -> Any:
        if case not in found:
            task, changes = CASES[case]
            found[case] = one(
                "tests.parity.cases:one_step", task=task, kind="torch", samples=SAMPLES, accumulate=1,
                changes=changes | SGD | PADDED,
            )[0]  # fmt: skip
        return found[case]

    return of


def step(workers: Workers, case: str, stage: int, sequence: int, accumulate: int = 2) -> list[dict[str, Any]]:
    task, changes = CASES[case]
    return workers(
        "tests.parity.cases:one_step", task=task, kind=f"zero{stage}", samples=SAMPLES, accumulate=accumulate,
        changes=changes | SGD | PACKED | {"parallel": {"sequence": sequence}},
    )  # fmt: skip


@pytest.mark.parametrize(("case", "stage"), [(case, stage) for case in CASES for stage in range(4)])
def test_two_processes_share_the_tokens_of_a_step(case: str, stage: int, two: Workers, definition: Any) -> None:
    for found in step(two, case, stage, 2):
        check_equal(found, definition(case))


@pytest.mark.parametrize(("case", "stage"), [("sft", 0), ("dpo", 3), ("rm, with images", 3), ("gemma2", 2), ("kto", 1)])
@pytest.mark.parametrize("sequence", [2, 4])
def test_four_processes_share_them_in_one_group_or_two(
    case: str, stage: int, sequence: int, four: Workers, definition: Any
) -> None:
    """With four, each process has a copy of a key-value head that two of them read."""
    for found in step(four, case, stage, sequence):
        check_equal(found, definition(case))
