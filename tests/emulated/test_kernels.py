"""Fused kernels launch less than half of transformers' kernels, and compile for every card."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernel_compilation import CAPABILITIES, KERNELS
from tests.emulated.conftest import EmulatedRun
from tests.interpreted import find_missing

pytestmark = [
    pytest.mark.cuda_emulated,
    pytest.mark.skipif(bool(find_missing()), reason=find_missing()),
]

COUNT = """
import json
from benchmarks.kernel_launches import count_layers
print(json.dumps(count_layers(["Llama", "Gemma 3"], ["eager", "fused"])))
"""
COMPILE = """
import json, sys
from benchmarks.kernel_compilation import CAPABILITIES, compile_kernel
print(json.dumps([compile_kernel(name, capability) for name in sys.argv[1:] for capability in CAPABILITIES]))
"""


def test_a_layer_launches_less_than_half(emulated_run: EmulatedRun) -> None:
    done = emulated_run(["-c", COUNT], timeout=500)
    assert done.returncode == 0, done.stdout
    for row in json.loads(done.stdout.splitlines()[-1]):
        eager, fused = (row[f"{way}, forward"] + row[f"{way}, backward"] for way in ("eager", "fused"))
        assert 2 * fused < eager, row


def test_kernels_compile_for_every_card(emulated_run: EmulatedRun) -> None:
    done = emulated_run(["-c", COMPILE, *KERNELS], timeout=500)
    assert done.returncode == 0, done.stdout
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == len(KERNELS) * len(CAPABILITIES)
    assert min(sizes) > 0
