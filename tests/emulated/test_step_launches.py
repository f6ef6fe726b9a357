"""An update launches as many kernels for a deep model as for a shallow one, and is that of DeepSpeed."""

from __future__ import annotations

import json

import pytest

from tests.emulated.conftest import EmulatedRun


@pytest.mark.cuda_emulated
def test_an_update_has_no_kernel_for_each_layer(emulated_run: EmulatedRun) -> None:
    done = emulated_run(["-m", "tests.emulated.step_cells"], timeout=300)
    assert done.returncode == 0, done.stdout
    cells = json.loads(done.stdout.splitlines()[-1])
    assert {preset: cell["growth"] for preset, cell in cells.items()} == dict.fromkeys(cells, 0)
    assert max(cell["distance"] for cell in cells.values()) <= 1e-6
