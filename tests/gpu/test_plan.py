"""The planned peak against the measured one, and caps that stand for cards of 8, 12, 16 and 24 GB."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.memory import place
from tests.gpu.plan_cases import RUNS, apart, predict

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ERROR = 0.10
CAPS = (8, 12, 16, 24)
GIB = 2**30


def label(run: dict[str, Any]) -> str:
    words = [run["shape"], run["preset"], f"{run['micro']}x{run['length']}"]
    return "-".join([*words, *(name for name in ("checkpointing", "lora") if run[name])])


def test_the_compared_runs_are_many_and_distinct() -> None:
    assert len(RUNS) >= 12
    assert len({label(run) for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize("run", RUNS, ids=label)
def test_the_peak_is_predicted(run: dict[str, Any], only_gpu: None) -> None:
    plan, found = predict(run), apart(cap=None, **run)
    error = plan.tensor_bytes / found["peak"] - 1
    row = {
        "run": label(run),
        "measured_gib": found["peak"] / GIB,
        "predicted_gib": plan.tensor_bytes / GIB,
        "error": error,
    }
    with place("plan.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row)
    assert abs(error) <= ERROR, plan.as_json()


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("run", [run for run in RUNS if run["shape"] == "1b"], ids=label)
def test_what_the_plan_says_of_a_card_is_true(run: dict[str, Any], cap: int, only_gpu: None) -> None:
    needed = predict(run).gpu_bytes / (cap * GIB)
    if 1 < needed <= 1 + ERROR:
        pytest.skip(f"the plan needs {needed:.0%} of the cap, within its error")
    found = apart(cap=float(cap), **run)
    assert found["fits"] == (needed <= 1), (
        f"planned {needed:.0%} of {cap} GiB, and it {'fits' if found['fits'] else 'does not fit'}"
    )
