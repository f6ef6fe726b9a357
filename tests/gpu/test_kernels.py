"""Fused kernels on a GPU: loss and gradients of the modules that they replace, with fewer launches."""

from __future__ import annotations

import pytest

from tests.gpu.test_step import BF16_APART
from tests.gpu.workers import IS_EMULATED, REHEARSAL, GpuWorkers
from tests.interpreted import find_missing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(find_missing()), reason=find_missing()),
    pytest.mark.skipif(
        IS_EMULATED, reason="on an emulated device Triton's kernels compute nothing: make test-cuda has them"
    ),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "mixtral"])
def test_a_model_computes_what_it_computed(family: str, precision: str, gpus: GpuWorkers) -> None:
    found = gpus("tests.gpu.cases:fused_pass", family=family, precision=precision)[0]
    assert found["fused"], "kernels were taken"
    limit = 1e-5 if precision == "float32" else BF16_APART
    assert abs(found["losses"][1] - found["losses"][0]) <= limit * abs(found["losses"][0])
    assert found["apart"] <= limit
    if not REHEARSAL and found["launches"][0]:
        assert found["launches"][1] < 0.6 * found["launches"][0]
