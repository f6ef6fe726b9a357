"""A base in MXFP4 or FP8 is the same model at every stage, and is never in memory twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cells import SLOW
from tests.quantized_bases import save_fp8, save_mxfp4
from tests.workers import Workers

LAYERS = 12
"""Many layers, so that the work on one tensor is little beside the model."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("mxfp4", 0), SLOW("mxfp4", 1), SLOW("mxfp4", 2), ("mxfp4", 3), SLOW("fp8", 0), ("fp8", 3)])  # fmt: skip
def test_a_base_is_dequantized_once_at_every_stage(kind: str, stage: int, tmp_path: Path, two: Workers) -> None:
    if kind == "mxfp4":
        wanted = save_mxfp4(tmp_path, files=3, num_hidden_layers=LAYERS)
    else:
        wanted = save_fp8(tmp_path, "llama", files=3, num_hidden_layers=LAYERS, intermediate_size=96)
    for found in two("tests.parity.quantized_base_cases:loaded", folder=str(tmp_path), kind=f"zero{stage}"):
        assert found["weights"].keys() == wanted.keys()
        for name, values in found["weights"].items():
            np.testing.assert_array_equal(values, wanted[name].to(torch.bfloat16).float().numpy(), err_msg=name)
        print({name: found[name] for name in ("peak", "after", "whole", "largest")})
        # of the largest tensor: its values, its quantized ones and the work on one expert in fp32
        assert found["peak"] <= found["after"] + 2 * found["largest"]
        assert found["after"] <= (found["whole"] if stage < 3 else 0.6 * found["whole"])
