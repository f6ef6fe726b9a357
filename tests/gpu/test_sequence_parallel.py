"""On two GPUs a step whose tokens they share equals the step of one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.test_step import BF16_APART, SGD, STEPS, distance
from tests.gpu.workers import GpuWorkers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_share_the_tokens_of_a_step(stage: int, precision: str, gpus: GpuWorkers) -> None:
    if gpus.size < 2:
        pytest.skip("NCCL needs a GPU for each process, and there is one")
    packed: dict[str, Any] = {**SGD, "batch": {"packing": True}}
    wanted = gpus(STEPS, kind="torch", count=1, accumulate=1, changes=packed, precision=precision)[0]
    changes = {**packed, "parallel": {"sequence": 2}}
    for found in gpus(STEPS, kind=f"zero{stage}", changes=changes, precision=precision):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5 if precision == "fp32" else 2e-2)
        assert distance(found, wanted) <= (1e-5 if precision == "fp32" else BF16_APART)
