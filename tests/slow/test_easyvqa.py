"""A vision-language model trained from scratch answers questions about shapes and colours."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.easyvqa import measure

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_a_small_model_learns_to_see(data: Path, tmp_path: Path) -> None:
    found = measure(data / "mm" / "easyvqa", tmp_path / "run", 2)
    assert found["parameters"] <= 1_500_000
    assert found["questions alone"]["all"] == pytest.approx(0.671, abs=5e-4)
    assert found["written"]["all"] >= 0.90
    assert found["written"]["what shape"] >= 0.90
    assert found["written"]["all"] == pytest.approx(found["curve"][-1]["exact_match"], abs=2e-3), "one is the other"
