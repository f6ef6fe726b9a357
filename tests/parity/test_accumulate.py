"""In bf16, too, a step does not depend on how many micro-batches it is cut into: their gradients are added up in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cells import SLOW
from tests.workers import Workers

CASE = "tests.parity.accumulate_cases:error"
EXACT = 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [SLOW("zero1"), SLOW("zero2"), "zero3", SLOW("zero2_offload"), SLOW("zero3_offload")]
)
def test_micro_batches_add_up_exactly(preset: str, one: Workers) -> None:
    for micro_batches in (1, 8):
        assert one(CASE, preset=preset, micro_batches=micro_batches)[0] < EXACT


def test_stage_1_with_its_optimizer_on_the_host_adds_up_exactly(one: Workers, tmp_path: Path) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert one(CASE, preset=written(tmp_path, {"zero_optimization": zero}), micro_batches=8)[0] < EXACT


def test_at_stage_0_deepspeed_adds_up_in_bf16(one: Workers) -> None:
    """What docs/memory.md says of it; DeepSpeed refuses another type there (engine.py, _do_optimizer_sanity_check)."""
    assert 1e-3 < one(CASE, preset="zero0", micro_batches=8)[0] < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [SLOW(2), 3])
def test_ranks_add_up_in_bf16_where_nothing_is_said(stage: int, two: Workers) -> None:
    assert 1e-4 < max(two(CASE, preset=f"zero{stage}", micro_batches=8)) < 3e-3


def written(folder: Path, block: dict[str, Any]) -> str:
    path = folder / "preset.json"
    path.write_text(json.dumps(block))
    return str(path)
