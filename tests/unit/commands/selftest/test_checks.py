"""Losses are compared row by row, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.selftest import (
    TOLERANCE,
    CheckResult,
    compare_losses,
    read_results,
    run_name,
    skip,
    write_results,
)


def rows(*losses: float | None) -> list[dict[str, Any]]:
    return [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


def test_equal_losses_differ_by_nothing() -> None:
    assert compare_losses(rows(0.7, 0.6), rows(0.7, 0.6)) == (0.0, "")


def test_rounding_is_no_difference() -> None:
    worst, problem = compare_losses(rows(0.7, 0.6 * (1 + TOLERANCE / 2)), rows(0.7, 0.6))
    assert worst == pytest.approx(TOLERANCE / 2, rel=1e-3)
    assert not problem


def test_the_step_that_differs_most_is_named_with_both_losses() -> None:
    worst, problem = compare_losses(rows(0.7, 0.61, 0.5), rows(0.7, 0.6, 0.5))
    assert worst == pytest.approx(1 / 60)
    assert "train loss of step 2 is 0.61, that of the unbroken run 0.6: a relative difference of 0.017" in problem


def test_a_loss_that_is_not_finite_differs() -> None:
    _, problem = compare_losses(rows(0.7, None), rows(0.7, 0.6))
    assert "step 2 is nan" in problem


def test_missing_rows_are_a_difference() -> None:
    worst, problem = compare_losses(rows(0.7), rows(0.7, 0.6))
    assert worst == float("inf")
    assert problem == "its rows are train 1, those of the unbroken run train 1, train 2"
    assert compare_losses([], [])[1], "two empty runs prove nothing"


def test_results_are_read_as_written(tmp_path: Path) -> None:
    results = [CheckResult(preset="zero2", check="train", state="ok", seconds=1.5), *skip("zero2", ["stop"], "why")]
    write_results(tmp_path / "results" / "a.json", results)
    assert read_results(tmp_path / "results" / "a.json") == results
    assert read_results(tmp_path / "results" / "b.json") == []


def test_a_json_file_is_named_without_its_folder() -> None:
    assert run_name("presets/mine.json") == "mine"
    assert run_name("zero2") == "zero2"
