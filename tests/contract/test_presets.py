"""Every preset in ds_configs trains, by existing."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest

from dstrain.preset import preset_names, read_preset
from tests.cells import mark_slow
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, write_recipe
from tests.workers import WorkerError, Workers

SETS = ["steps=3", "eval.every=100", "batch.total=7"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("presets")
    write_recipe(folder, tiny_recipe("rm", folder))
    return str(folder / "recipe.yaml")


@pytest.fixture(scope="module")
def plain(recipe: str, tmp_path_factory: pytest.TempPathFactory, two: Workers) -> list[float]:
    """Losses without ZeRO, in fp32."""
    folder = tmp_path_factory.mktemp("plain")
    two(RUN, recipe=recipe, run_dir=str(folder), sets=[*SETS, "ds_config=zero0"])
    return [row["loss"] for row in metric_rows(folder)]


CASES = [
    (name, precision)
    for name in preset_names()
    for precision in ("fp32", "bf16")
    if read_preset(name).precision in (None, precision)
]
GPU_ONLY = {"zero3_zeropp": "quantized collectives need a GPU", "zero2_fp16": "fp16 needs a GPU"}
"""Preset -> the reason why a CPU does not run it."""


FAST = (
    ("zero2_cpu_checkpointing", "fp32"),
    ("zero3_hpz", "fp32"),
    ("zero3_offload", "bf16"),
)
"""Presets that each set something the others do not; the plain stages: parity/test_step and test_precision;
zero2_offload: zero3_offload."""


@pytest.mark.parametrize("name", GPU_ONLY)
def test_a_preset_that_needs_a_gpu_says_so(name: str, recipe: str, tmp_path: Path, one: Workers) -> None:
    with pytest.raises(WorkerError, match=f"{GPU_ONLY[name]}"):
        one(RUN, recipe=recipe, run_dir=str(tmp_path), sets=[*SETS, f"ds_config={name}"])


@pytest.mark.parametrize(
    ("name", "precision"),
    mark_slow(CASES, [case for case in CASES if case not in FAST and case[0] not in GPU_ONLY]),
)
def test_a_preset_trains_as_plain_training_does(
    name: str, precision: str, recipe: str, plain: list[float], tmp_path: Path, two: Workers
) -> None:
    preset = read_preset(name)
    if name in GPU_ONLY:
        pytest.skip(GPU_ONLY[name])
    if "nvme" in (preset.offload_optimizer, preset.offload_param) and not ctypes.util.find_library("aio"):
        pytest.skip("offloading to NVMe needs Debian's libaio-dev")
    told = two(RUN, recipe=recipe, run_dir=str(tmp_path), sets=[*SETS, f"ds_config={name}", f"precision={precision}"])
    if "nvme" in (preset.offload_optimizer, preset.offload_param):
        two.close()  # DeepSpeed keeps gigabytes of pinned buffers; the next test starts anew
    assert [result["code"] for result in told] == [0, 0]
    found = [row["loss"] for row in metric_rows(tmp_path)]
    assert found == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 2e-2)
