"""On GPUs a step equals plain PyTorch's at every stage, with and without offloading, within each precision."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.workers import GpuWorkers

pytestmark = pytest.mark.gpu

STEPS = "tests.gpu.cases:steps"
SGD = {"optim": {"name": "sgd", "lr": 10.0, "clip": 0.05}}
ADAM = {"optim": {"name": "adamw", "lr": 1e-3, "eps": 1e-3}}  # at an eps of 1e-8 Adam turns rounding into steps

BF16_APART = 0.1  # of the way 20 steps of Adam go


def moved(result: dict[str, Any]) -> dict[str, np.ndarray]:
    strip = lambda values: {name.removeprefix("module."): value for name, value in values.items()}  # noqa: E731
    before, after = strip(result["before"]), strip(result["after"])
    return {name: after[name] - before[name] for name in before}


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Between what the steps did to all weights, relative."""
    ours, theirs = moved(found), moved(wanted)
    assert ours.keys() == theirs.keys()
    square = lambda values: sum(float((value**2).sum()) for value in values)  # noqa: E731
    return float(np.sqrt(square(ours[name] - theirs[name] for name in theirs) / square(theirs.values())))


@pytest.fixture(scope="module")
def definition(gpus: GpuWorkers) -> Any:
    """What plain PyTorch does, in fp32, on the first GPU."""

    @cache
    def of(count: int, optim: str) -> dict[str, Any]:
        return gpus(STEPS, kind="torch", count=count, accumulate=1, changes={"sgd": SGD, "adam": ADAM}[optim])[0]

    return of


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_is_the_definition(stage: int, gpus: GpuWorkers, definition: Any) -> None:
    wanted = definition(1, "sgd")
    for found in gpus(STEPS, kind=f"zero{stage}", changes=SGD):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert distance(found, wanted) <= 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_follows_the_definition(stage: int, gpus: GpuWorkers, definition: Any) -> None:
    wanted = definition(20, "adam")
    for found in gpus(STEPS, kind=f"zero{stage}", count=20, changes=ADAM, precision="bf16"):
        assert all(found["applied"])
        assert found["losses"] == pytest.approx(wanted["losses"], abs=2e-2)
        assert distance(found, wanted) <= BF16_APART


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_finds_its_scale_and_learns(stage: int, gpus: GpuWorkers, only_gpu: None, tmp_path: Path) -> None:
    for found in gpus(
        "tests.gpu.cases:fp16", folder=str(tmp_path), preset=f"zero{stage}", count=60, initial_scale_power=28
    ):
        lowered = found["events"].count("loss_scale_lowered")
        assert lowered >= 3, "more in a row than the guard allows where a loss is not finite"
        assert found["events"] == ["loss_scale_lowered"] * lowered, "none counts as a skipped step"
        assert found["applied"].count(False) == lowered
        assert sum(found["losses"][-9:]) < 0.8 * sum(found["losses"][:9]), (
            "the same 64 pairs, about 9 steps to an epoch"
        )


@pytest.mark.xfail(
    reason="DeepSpeed 0.19.8 divides by the new scale in the step that raises it: half a gradient once in loss_scale_window steps "
    "(stage_1_and_2.py and stage3.py: _update_scale stands before unscale_and_clip_grads)",
    strict=False,
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_growing_loss_scale_changes_no_step(stage: int, gpus: GpuWorkers, only_gpu: None, tmp_path: Path) -> None:
    for found in gpus("tests.gpu.cases:growing_scale", folder=str(tmp_path), preset=f"zero{stage}", count=8):
        assert len(set(found["scales"])) > 1
        assert found["moved"] == pytest.approx([found["moved"][0]] * 8, rel=2e-2)
        assert found["norms"] == pytest.approx([found["norms"][0]] * 8, rel=2e-2)


def test_fused_adamw_is_adamw(gpus: GpuWorkers) -> None:
    for apart in gpus("tests.gpu.cases:fused_and_plain", count=20):
        assert apart <= 1e-6


@pytest.mark.parametrize("optim", ["sgd", "adam"])
@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_changes_nothing(stage: int, optim: str, gpus: GpuWorkers) -> None:
    changes = {"sgd": SGD, "adam": ADAM}[optim]
    count = 1 if optim == "sgd" else 5
    plain = gpus(STEPS, kind=f"zero{stage}", count=count, changes=changes)
    offloaded = gpus(STEPS, kind=f"zero{stage}_offload", count=count, changes=changes)
    for found, wanted in zip(offloaded, plain, strict=True):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert distance(found, wanted) <= (1e-5 if optim == "sgd" else 1e-4)
