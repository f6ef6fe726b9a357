"""What each preset needs on cards of 8, 12, 16 and 24 GB: a table, and the few claims that hold on any card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import certificate, table
from benchmarks.loading import save_base
from tests.benchmarks.test_loading import BOUND
from tests.gpu.memory import OPTIONS, place, sweep
from tests.gpu.workers import IS_SLOW, GpuWorkers

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_table_of_presets_and_cards_is_made(tmp_path: Path) -> None:
    tiny = {
        "shape": "tiny",
        "length": 64,
        "presets": "zero0,zero2_offload",
        "caps": "24,8",
        "precision": "fp32",
        "steps": 3,
    }
    settings = {**OPTIONS, **(tiny if IS_SLOW else {})}
    rows = sweep(**settings)
    where = tmp_path / "memory.json" if IS_SLOW else place("memory.json")
    where.write_text(json.dumps({"certificate": certificate(), "settings": settings, "rows": rows}, indent=1))
    print(f"{table(rows)}\nwritten to {where}")
    by = {(row["preset"], row["cap_gb"]): row for row in rows}
    assert len(by) == len(settings["presets"].split(",")) * len(settings["caps"].split(","))
    broken = {key: row["why"] for key, row in by.items() if row["fits"] is None and "nvme" not in key[0]}
    assert not broken, "failed for another reason than memory"
    for row in rows:
        if row["fits"] and not IS_SLOW:  # a CPU reports no peak
            assert row["peak_gib"] <= row["cap_gb"]
    if not IS_SLOW:  # 1.1 billion parameters at 16 bytes are 17.6 GB, 2 of them weights
        assert by["zero3_offload", 8.0]["fits"], "weights and optimizer on the host leave room on any card"
        assert not by["zero0", 12.0]["fits"]


@pytest.mark.parametrize("preset", ["zero1", "zero2"])
def test_a_host_keeps_no_copy_of_weights_that_went_to_the_devices(
    preset: str, gpus: GpuWorkers, tmp_path: Path
) -> None:
    shape = "tiny" if IS_SLOW else "100m"
    save_base(tmp_path, shape, "bfloat16")
    for told in gpus("tests.gpu.cases:host_memory", folder=str(tmp_path), shape=shape, preset=preset):
        assert told["parameters"] > 0
        assert IS_SLOW or told["anonymous"] / told["parameters"] <= BOUND
