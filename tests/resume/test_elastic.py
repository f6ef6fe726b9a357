"""A run goes on with any number of processes and at any ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.tasks import find_task
from tests.resume.test_resume import events, rows
from tests.workers import Workers

RUN = "tests.resume.cases:run"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The tiny reward model without dropout, 64 pairs, 6 samples per step."""
    values = find_task("rm").tiny(tmp_path)
    values |= {"steps": 9, "batch": {"total": 6, "micro": 2}, "save": {"every": 3, "keep": 9}, "precision": "fp32"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return str(tmp_path / "recipe.yaml")


def close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """Rows of metrics.jsonl: equal but for rounding, which Adam makes larger where a gradient is nearly zero."""
    assert [(row["step"], row["samples"], row["split"]) for row in ours] == [
        (row["step"], row["samples"], row["split"]) for row in theirs
    ]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "margin", "lr", "grad_norm"):
            if name in mine:
                assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), (mine["step"], name)


def test_a_run_goes_on_with_two_processes_one_and_three(
    recipe: str, tmp_path: Path, one: Workers, two: Workers, three: Workers
) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"))
    for workers, preset, crash in ((two, "zero3", 5), (one, "zero2_offload", 8), (three, "zero1", None)):
        workers(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[f"ds_config={preset}"], crash_at=crash)
    close(rows(tmp_path / "run"), rows(tmp_path / "whole"))
    told = events(tmp_path / "run", "reshaped")
    assert [event["step"] for event in told] == [3, 6]
    assert "zero3 (ZeRO stage 3) on 2 processes and goes on as zero2_offload (ZeRO stage 2) on 1" in told[0]["how"]
