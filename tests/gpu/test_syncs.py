"""On a GPU the host waits in a step only where tests/unit/training/engine/test_module.py says so."""

from __future__ import annotations

import pytest

from tests.gpu.workers import GpuWorkers

pytestmark = pytest.mark.gpu

WAITS = {"rm": 0, "dpo": 0, "sft": 0, "kto": 1}
"""Task -> waits for a value by dstrain itself before the last `engine.step()`: KTO's mean over a step."""


@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("task", WAITS)
def test_the_host_runs_ahead_of_the_gpu(task: str, preset: str, gpus: GpuWorkers, only_gpu: None) -> None:
    for waits in gpus("tests.gpu.cases:waits", task=task, preset=preset):
        assert len(waits) == WAITS[task], waits
