"""Every task trains on an emulated device with the losses of a CPU; presets and methods take turns.

All pairs of task, preset and method: `python -m benchmarks.emulated_runs`, whose table is docs/measurements/gpu-runs.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.emulated_runs import METHODS, PRESETS, TASKS, Cell, Server, make_cells, run_cell

pytestmark = pytest.mark.cuda_emulated

CELLS = [
    Cell("rm", "zero0", "full"),
    Cell("dpo", "zero3", "LoRA", ranks=2),
    Cell("dpo precomputed", "zero1", "full"),
    Cell("sft", "zero3", "nf4", ranks=2),
    Cell("sft", "zero2", "full", ranks=2, changes={"parallel.sequence": 2}),
    Cell("kto", "zero2_bf16", "full", precision="bf16"),
    Cell("prm", "zero2", "DoRA"),
    Cell("distill", "zero2_cpu_checkpointing", "full"),
    Cell("vlm", "zero3_hpz", "full", ranks=2),
    Cell("docqa", "zero1", "int8"),
    Cell("protein", "zero2", "adamw_8bit"),
    Cell("temporal", "zero2", "muon"),
    Cell("safe_dpo", "zero2", "paged_adamw_8bit"),
]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """A process that forks runs on emulated devices, and one that forks runs on the CPU."""
    device, host = Server({}), Server(None)
    yield device, host
    device.close()
    host.close()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_losses_are_those_of_a_cpu(servers: tuple[Server, Server], cell: Cell) -> None:
    row = run_cell(cell, *servers)
    assert row["result"] == "equal", row
    assert row["device"]["emulator"] == []


def test_the_grid_holds_every_pair() -> None:
    cells = make_cells()
    assert {(cell.task, cell.preset) for cell in cells} == {(task, preset) for task in TASKS for preset in PRESETS}
    assert {(cell.task, cell.method) for cell in cells} == {(task, method) for task in TASKS for method in METHODS}
    assert {(cell.preset, cell.method) for cell in cells} == {(name, method) for name in PRESETS for method in METHODS}
