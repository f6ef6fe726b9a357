"""Peaks of torch's CUDA allocator for tests: cases of benchmarks/planner_allocator.py, measured in forks of one process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner_allocator import HIGH, LOW, plan_case


def measuring_arguments(names: Sequence[str], rows: Path, *more: str) -> list[str]:
    """Return the arguments of Python that measure the cases of these names into a file of rows."""
    pattern = f"^({'|'.join(re.escape(name) for name in names)})$"
    return ["-m", "benchmarks.planner_allocator", "--only", pattern, "--rows", str(rows), *more]


def read_rows(rows: Path, output: str) -> dict[str, Any]:
    """Return name -> row of a file of rows; `output` is that of the process which should have written it."""
    assert rows.is_file(), output[-3000:]
    measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    return {row["case"]["name"]: row for row in measured}


def check_plan(row: Mapping[str, Any]) -> None:
    """Assert that the plan of a case has the tensors that the allocator had at its peak."""
    assert "fault" not in row, row
    plan = plan_case(row["case"])
    ratio = plan.tensor_bytes / row["allocated"]
    print(f"{row['case']['name']}: {row['allocated'] / 2**30:.2f} GiB, planned {ratio - 1:+.1%}")
    assert LOW <= ratio <= HIGH, (row, plan.as_json())
