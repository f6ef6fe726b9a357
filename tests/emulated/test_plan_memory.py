"""The planned peaks of tensors are those of torch's CUDA allocator on an emulated device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.planner_allocator import read_cases
from tests.allocator import check_plan, measuring_arguments, read_rows

pytestmark = pytest.mark.cuda_emulated

NAMES = (
    "sft 100m 4 x 1024 zero2",
    "sft 100m 8 x 512 zero3",
    "sft 100m 4 x 1024 zero1, gradient_checkpointing: false",
    "sft qwen2.5-0.5b 4 x 1024 zero2",
    "sft qwen2.5-0.5b 4 x 1024 zero2, gradient_checkpointing: false, accumulate: 4",
    "sft qwen2.5-0.5b 4 x 1024 zero2, precision: fp16",
    "rm 100m 4 x 1024 zero1, gradient_checkpointing: false",
    "dpo qwen2.5-0.5b 2 x 1024 zero2, packing: false",
    "kto qwen2.5-0.5b 4 x 1024 zero2",
    "sft qwen2.5-0.5b 1 x 1024 zero2, lora: {}, quantize: nf4, name: paged_adamw_8bit",
    "sft qwen2.5-0.5b 4 x 1024 zero2, gradient_checkpointing: false, kernels: liger",
    "rm 1b 2 x 1024 zero2, gradient_checkpointing: false, kernels: liger",
    "sft qwen2.5-0.5b 4 x 1024 zero2, 2 GPUs",
)  # fmt: skip


def test_the_peaks_are_planned(emulated_run: Callable[..., object], tmp_path: Path) -> None:
    known = {case["name"] for case in read_cases()}
    assert known >= {*NAMES}
    rows = tmp_path / "rows.jsonl"
    done = emulated_run(
        measuring_arguments(NAMES, rows), timeout=550, EMU_VALUES="2", EMU_GPUS="2", EMU_MEMORY_MB="400000"
    )
    measured = read_rows(rows, done.stdout)  # type: ignore[attr-defined]
    assert measured.keys() == {*NAMES}
    for row in measured.values():
        check_plan(row)
