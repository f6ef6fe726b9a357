"""8-bit AdamW at every stage: near AdamW, and resumed bit for bit, also with other partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import SLOW
from tests.parity.test_optimizers import distance
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, write_recipe
from tests.workers import WorkerError, Workers

pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")

CASES = "tests.parity.optimizer_cases"
EIGHT_BIT = {"name": "adamw_8bit", "weight_decay": 0.1, "eps": 1e-3}
NEAR = 0.05
"""Of the way of three steps: two moments of which a code of 8 bits keeps two to three digits."""


# Stages 1 and 2, one class of DeepSpeed: a checkpoint's, below. Memory is not paged on a CPU.
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_steps_are_near_those_of_adamw(preset: str, one: Workers, two: Workers) -> None:
    wanted = one(f"{CASES}:steps", kind="torch", optim=EIGHT_BIT | {"name": "adamw"}, wide=True)[0]
    for found in two(f"{CASES}:steps", kind=preset, optim=EIGHT_BIT, wide=True):
        assert 0 < distance(found, wanted) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "precision"), [("zero2", "bf16"), ("zero3", "fp32"), SLOW("zero0", "bf16")])
def test_a_checkpoint_goes_on_bit_for_bit(preset: str, precision: str, two: Workers, tmp_path: Path) -> None:
    found = two(f"{CASES}:resumed", kind=preset, optim=EIGHT_BIT, precision=precision, folder=str(tmp_path), wide=True)
    assert found == [0.0, 0.0]


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_partitions(one: Workers, two: Workers, tmp_path: Path) -> None:
    """Blocks that hold other values than before are quantized again: a rounding, as in every step."""
    wanted = one(f"{CASES}:steps", kind="torch", optim=EIGHT_BIT | {"name": "adamw"}, wide=True, count=5)[0]
    kept = two(f"{CASES}:moved", kind="zero2", optim=EIGHT_BIT, folder=str(tmp_path))[0]["checkpoint"]
    for workers in (one, two):
        for found in workers(f"{CASES}:moved", kind="zero3", optim=EIGHT_BIT, folder="", load=kept):
            assert distance(found, wanted) < NEAR


def test_8_bit_state_with_offload_is_refused(tmp_path: Path, one: Workers) -> None:
    values = tiny_recipe("rm", tmp_path) | {"optim": {"name": "adamw_8bit"}, "ds_config": "zero2_offload"}
    with pytest.raises(WorkerError, match=r"optim\.name: adamw_8bit runs on the GPU.*CPUAdam"):
        one(RUN, recipe=str(write_recipe(tmp_path, values)), run_dir=str(tmp_path / "run"))
