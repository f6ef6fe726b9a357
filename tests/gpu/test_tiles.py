"""MLPs and norms in tiles on a GPU: the gradients of whole passes, in less memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.test_step import BF16_APART
from tests.gpu.workers import IS_SLOW, GpuWorkers

pytestmark = pytest.mark.gpu

TOKENS = 512 if IS_SLOW else 32768
SHARE = 0.7
"""Most of the peak of a whole pass that a pass in tiles may take; by the plan it takes half."""


def test_tiles_change_no_gradient_and_take_less_memory(gpus: GpuWorkers) -> None:
    whole, tiled = (
        gpus("tests.gpu.cases:tiled_pass", tiled=tiles, tokens=TOKENS)[0] for tiles in (False, TOKENS // 16)
    )
    wanted, found = whole["gradients"], tiled["gradients"]
    assert found.keys() == wanted.keys()
    square = sum(float(np.square(wanted[name]).sum()) for name in wanted)
    apart = sum(float(np.square(found[name] - wanted[name]).sum()) for name in wanted)
    assert (apart / square) ** 0.5 <= BF16_APART
    if not IS_SLOW:
        assert tiled["peak"] <= SHARE * whole["peak"]
