"""A step with fused kernels is the step without them: in shards, in parts of a sequence, with adapters, in tiles."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cells import SLOW
from tests.interpreted import find_missing
from tests.model_families import family
from tests.parity.test_step import SGD, distance
from tests.workers import Workers

pytestmark = pytest.mark.skipif(bool(find_missing()), reason=find_missing())

SAMPLES = [5, 0, 9]
LORA = {"lora": {"rank": 4, "alpha": 8.0}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "in shards": ("sft", "zero3", {}),
    "dpo": ("dpo", "zero2", {"moved": True}),
    "rm, padded rows": ("rm", "zero3", {"batch": {"packing": False}}),
    "images": ("vlm", "zero3", {}),
    "adapters": ("sft", "zero3", {"model": LORA, "moved": True}),
    "nf4": ("sft", "zero3", {"model": {**LORA, "quantize": "nf4"}, "moved": True}),
    "parts of sequences": ("sft", "zero3", {"parallel": {"sequence": 2}, "batch": {"packing": True}}),
    "tiles": ("sft", "zero3", {"model": {"tiled_mlp": 16}}),
    "no recomputation": ("sft", "zero1", {"model": {"gradient_checkpointing": False}}),
    "frozen layers": ("sft", "zero2", {"model": {"freeze": ["*.embed_tokens", "model.layers.0"]}}),
    "router's loss": ("sft", "zero3", {"model": {"config": family("mixtral"), "router_aux_loss_coef": 0.1}}),
}
QUICK = ("in shards",)
"""The others take a minute each: the interpreter computes row by row."""


@pytest.mark.parametrize("case", [case if case in QUICK else SLOW(case) for case in CASES])
def test_a_step_is_the_same_with_fused_kernels(case: str, two: Workers) -> None:
    task, preset, changes = CASES[case]
    model = changes.get("model", {})
    step: dict[str, Any] = {"task": task, "kind": preset, "samples": SAMPLES, "accumulate": 1}
    eager = two("tests.parity.cases:one_step", **step, changes=changes | SGD | {"model": {**model, "kernels": "none"}})
    fused = two(
        "tests.parity.kernel_cases:one_step", **step, changes=changes | SGD | {"model": {**model, "kernels": "liger"}}
    )
    for wanted, found in zip(eager, fused, strict=True):
        assert found["fused"], "a model was built"
        assert all(any("residual + norm" in name for name in one) for one in found["fused"])
        assert found["sums"] == pytest.approx(wanted["sums"], rel=1e-5, abs=1e-5)
        assert distance(found, wanted) <= 1e-5
