"""An optimizer is the same optimizer at every stage it may run at; what it would not be is refused."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows
from tests.workers import Workers

CASES = "tests.parity.optimizer_cases"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "weight_decay": 0.1, "eps": 1e-3},
    "sgd": {"name": "sgd", "weight_decay": 0.1},
    "lion": {"name": "lion", "weight_decay": 0.1},
    "muon": {"name": "muon", "weight_decay": 0.1, "eps": 1e-3, "groups": {"layers.3": {"lr": 0.002}}},
    "adafactor": {"name": "adafactor", "weight_decay": 0.1},
}
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
# sgd: stages 0 and 3 and zero3_offload; these presets: with lion.
OTHERS = {"adafactor": ("zero0",), "sgd": ("zero0", "zero3", "zero3_offload")}
RUNS = [(name, preset) for name in OPTIMIZERS for preset in OTHERS.get(name, PRESETS)]


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Between two ends, relative to the way there."""
    square = lambda values: sum(float((value**2).sum()) for value in values)  # noqa: E731
    way = square(wanted["after"][n] - wanted["before"][n] for n in wanted["after"])
    return float(np.sqrt(square(found["after"][n] - wanted["after"][n] for n in wanted["after"]) / way))


def in_bf16(values: dict[str, Any]) -> dict[str, Any]:
    """The weights as bf16 has them: eight bits of mantissa, to the nearest even."""
    bits = {name: value.astype(np.float32).view(np.uint32) for name, value in values["after"].items()}
    rounded = {name: ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) << 16 for name, b in bits.items()}
    return values | {"after": {name: b.astype(np.uint32).view(np.float32).astype(float) for name, b in rounded.items()}}


@pytest.fixture(scope="module")
def definition(one: Workers) -> Any:
    """What plain PyTorch makes of the same samples."""
    found: dict[str, Any] = {}

    def of(name: str, **more: Any) -> Any:
        key = f"{name} {more}"
        if key not in found:
            found[key] = one(f"{CASES}:steps", kind="torch", optim=OPTIMIZERS[name], **more)[0]
        return found[key]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset"), RUNS)
def test_steps_are_the_same_at_every_stage(name: str, preset: str, definition: Any, two: Workers) -> None:
    wanted = definition(name)
    # CPUAdam orders its sums in another way. Fused AdamW rounds the last values of a tensor, which do not fill a
    # vector of the processor, in another way than the rest, and ZeRO cuts tensors elsewhere.
    allowed = (1e-5 if "_" in preset else 1e-8) if name == "adamw" else 0
    for found in two(f"{CASES}:steps", kind=preset, optim=OPTIMIZERS[name]):
        assert all(np.array_equal(found["before"][n], wanted["before"][n]) for n in wanted["before"])
        assert distance(found, wanted) <= allowed


@pytest.mark.slow
def test_a_part_of_the_optimizer_on_the_gpu_learns_and_is_resumed(
    two: Workers, definition: Any, tmp_path: Path
) -> None:
    """Its rates were 0 in all steps, and no checkpoint held its moments (DeepSpeed's backup_optimizer)."""
    offload = {"device": "cpu", "pin_memory": False, "ratio": 0.4}
    part = {
        "kind": "zero3", "optim": OPTIMIZERS["adamw"],
        "more": {"zero_optimization": {"offload_optimizer": offload, "sub_group_size": 200}},
    }  # fmt: skip
    for found in two(f"{CASES}:partly_offloaded", what="steps", **part):
        assert distance(found, definition("adamw")) <= 1e-5
    assert two(f"{CASES}:partly_offloaded", what="resumed", folder=str(tmp_path), **part) == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.skipif(not ctypes.util.find_library("aio"), reason="offloading to NVMe needs libaio")
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
def test_steps_are_the_same_with_everything_on_a_disk(name: str, two: Workers, definition: Any) -> None:
    wanted = definition(name, wide=True)
    found = two(f"{CASES}:steps", kind="zero3_nvme", optim=OPTIMIZERS[name], wide=True)
    two.close()  # DeepSpeed keeps its locked buffers
    for of_rank in found:
        assert distance(of_rank, wanted) <= (1e-5 if name == "adamw" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset"), RUNS)
def test_steps_in_bf16_are_those_of_fp32_masters(name: str, preset: str, two: Workers, definition: Any) -> None:
    """Muon's momentum is in bf16 where gradients are: Newton-Schulz makes of the last bit what it makes of noise."""
    wanted = in_bf16(definition(name, precision="bf16"))
    coarse = name == "muon" and preset not in ("zero0", "zero2_offload")
    exact = not (name == "adamw" and "_" in preset)
    for found in two(f"{CASES}:steps", kind=preset, optim=OPTIMIZERS[name], precision="bf16"):
        assert distance(found, wanted) <= (0.06 if coarse else 0 if exact else 1e-5)


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("zero1", {"round_robin_gradients": True}),
        ("zero2", {"reduce_scatter": False}),
        ("zero2", {"reduce_bucket_size": 100}),
        ("zero2", {"overlap_comm": False, "contiguous_gradients": False}),
        ("zero3", {"sub_group_size": 200, "reduce_bucket_size": 100}),
    ],
)
def test_muon_does_not_mind_where_matrices_are_cut(
    preset: str, more: dict[str, Any], two: Workers, definition: Any
) -> None:
    json = {"zero_optimization": more}
    for found in two(f"{CASES}:steps", kind=preset, optim=OPTIMIZERS["muon"], more=json):
        assert distance(found, definition("muon")) == 0


@pytest.mark.slow
def test_muon_keeps_a_finer_momentum_where_stage_1_sums_in_fp32(two: Workers, definition: Any) -> None:
    json = {"data_types": {"grad_accum_dtype": "fp32"}}
    wanted = in_bf16(definition("muon", precision="bf16"))
    for found in two(f"{CASES}:steps", kind="zero1", optim=OPTIMIZERS["muon"], precision="bf16", more=json):
        assert distance(found, wanted) == 0


@pytest.mark.parametrize(
    ("preset", "optim"), [("zero2", OPTIMIZERS["adafactor"]), ("zero2", OPTIMIZERS["muon"] | {"clip": 1.0})]
)
def test_what_is_refused_would_be_another_optimizer(
    preset: str, optim: dict[str, Any], one: Workers, two: Workers
) -> None:
    wanted = one(f"{CASES}:steps", kind="torch", optim=optim)[0]
    for found in two(f"{CASES}:unchecked", kind=preset, optim=optim):
        assert distance(found, wanted) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "muon"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3", "zero3_offload"])
def test_a_step_that_is_not_finite_leaves_no_trace(name: str, preset: str, two: Workers, definition: Any) -> None:
    wanted = definition(name, poison=1)
    for found in two(f"{CASES}:steps", kind=preset, optim=OPTIMIZERS[name], poison=1):
        assert distance(found, wanted) == 0
        assert not np.isfinite(found["norms"][1])


@pytest.mark.parametrize("preset", ["zero0", "zero2", "zero3_offload"])
def test_lion_leaves_the_embedding_of_an_unseen_token_alone(preset: str, two: Workers) -> None:
    for found in two(f"{CASES}:steps", kind=preset, optim={"name": "lion"}):
        assert np.array_equal(found["after"]["table.weight"][0], found["before"]["table.weight"][0])
        assert not np.array_equal(found["after"]["table.weight"][1], found["before"]["table.weight"][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset", "precision"),
    [
        *((name, preset, "fp32") for name, preset in RUNS if name in ("lion", "muon")),
        ("adafactor", "zero0", "fp32"),
        ("adafactor", "zero0", "bf16"),
        ("muon", "zero1", "bf16"),
        ("muon", "zero2", "bf16"),
        ("muon", "zero3", "bf16"),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit(name: str, preset: str, precision: str, two: Workers, tmp_path: Path) -> None:
    optim = OPTIMIZERS[name]
    assert two(f"{CASES}:resumed", kind=preset, optim=optim, precision=precision, folder=str(tmp_path)) == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_resuming_a_run_changes_nothing(name: str, tmp_path: Path, two: Workers) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 5, "save": {"every": 2}}
    values["optim"] = {"name": name, "lr": 1e-3, "weight_decay": 0.1}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    two(RUN, recipe=str(recipe), run_dir=str(tmp_path / "whole"))
    two(RUN, recipe=str(recipe), run_dir=str(tmp_path / "broken"), crash_at=4)
    again = two(RUN, recipe=str(recipe), run_dir=str(tmp_path / "broken"))
    assert [result["code"] for result in again] == [0, 0]
    assert metric_rows(tmp_path / "broken") == metric_rows(tmp_path / "whole")


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """Five turns of Newton-Schulz: X <- a X + (b A + c A A) X with A = X X^T, from X = G / |G|."""
    tall = matrix.shape[0] > matrix.shape[1]
    found = (matrix.T if tall else matrix) / np.linalg.norm(matrix)
    for _ in range(5):
        gram = found @ found.T
        found = 3.4445 * found + (-4.7750 * gram + 2.0315 * gram @ gram) @ found
    return found.T if tall else found


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16)])
def test_muon_is_its_papers_formula(shape: tuple[int, int], one: Workers) -> None:
    """Jordan (2024): M <- 0.95 M + 0.05 G, O = NewtonSchulz(0.95 M + 0.05 G); 0.2 sqrt(max(r, c)) as Liu et al., eq. 4.

    DeepSpeed turns in fp16 where the processor has it, so two digits agree; the singular values are around 1.
    """
    draw, rates = np.random.default_rng(0), (0.1, 0.05)
    gradients = [draw.standard_normal(shape) for _ in rates]
    wanted, momentum = np.ones(shape), np.zeros(shape)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient
        step = orthogonal(0.95 * momentum + 0.05 * gradient)
        assert np.linalg.svd(step)[1] == pytest.approx(1, abs=0.35)
        wanted = wanted * (1 - rate * 0.1) - rate * 0.2 * max(shape) ** 0.5 * step
    found = one(f"{CASES}:muon_steps", rows=shape[0], columns=shape[1], gradients=gradients, rates=rates)[0]
    assert np.linalg.norm(found - wanted) <= 0.02 * np.linalg.norm(wanted - np.ones(shape) * 0.98505)


def test_muon_runs_uncompiled(one: Workers) -> None:
    """Compiled kernels round as the shapes seen before have made them, and a resumed run has seen others."""
    assert one(f"{CASES}:muons_functions")[0] == [True] * 4
