"""The planned peak against that of the allocator, also on a card of the planned size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import ROOT
from benchmarks.planner_allocator import plan_case, read_cases
from tests.allocator import check_plan, measuring_arguments, read_rows
from tests.gpu.memory import place

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NAMES = (
    "sft 100m 4 x 1024 zero2",
    "sft 100m 8 x 512 zero3",
    "sft 100m 4 x 1024 zero1, gradient_checkpointing: false",
    "sft qwen2.5-0.5b 4 x 1024 zero2, gradient_checkpointing: false",
    "sft qwen2.5-1.5b 2 x 1024 zero2, accumulate: 4",
    "sft qwen2.5-1.5b 8 x 2048 zero2, lora: {\"rank\": 16}, gradient_checkpointing: false",
    "sft llama-3.1-8b 1 x 1024 zero2, lora: {\"rank\": 16}",
    "sft llama-3.1-8b 4 x 2048 zero2, lora: {\"rank\": 16}, quantize: nf4",
    "rm 1b 2 x 1024 zero2",
    "prm 1b 2 x 1024 zero3",
    "dpo qwen2.5-0.5b 2 x 1024 zero2",
    "kto qwen2.5-0.5b 4 x 1024 zero2",
)  # fmt: skip


def measure(names: tuple[str, ...], rows: Path, *more: str) -> dict[str, dict[str, object]]:
    environment = {**os.environ, "EMU_VALUES": "2"}  # read by an emulated device alone: peaks need no values
    done = subprocess.run(
        [sys.executable, *measuring_arguments(names, rows, *more)], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=590, check=False,
    )  # fmt: skip
    return read_rows(rows, done.stderr)


def test_the_peaks_are_planned(only_gpu: None) -> None:
    rows = place("plan.jsonl")
    measured = measure(NAMES, rows)
    assert measured.keys() == {*NAMES}
    for row in measured.values():
        check_plan(row)


ROUNDING = 1.01
"""Size of a card to the planned one: the allocator's segments are whole pages."""


def test_a_card_of_the_planned_size_is_enough(only_gpu: None, tmp_path: Path) -> None:
    cases = []
    for case in read_cases():
        if case["name"] in NAMES[:6]:
            cases.append({**case, "card_bytes": round(ROUNDING * plan_case(case).gpu_bytes)})
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"defaults": {}, "cases": cases}))
    measured = measure(NAMES[:6], tmp_path / "rows.jsonl", "--cases", str(file))
    assert len(measured) == 6
    for row in measured.values():
        assert "fault" not in row, row
