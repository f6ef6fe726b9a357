"""Worker functions of test_families: one step with few rows of logits at a time."""

from __future__ import annotations

from typing import Any
from unittest import mock

from dstrain.models import heads
from tests.parity.cases import one_step

VOCABULARY = 320


def step_in_chunks(rows: int, **arguments: Any) -> dict[str, Any]:
    """Return `one_step` with `rows` rows of logits per chunk, and how many models did not use chunks. Collective."""
    with mock.patch.dict(heads.MAX_CHUNK_BYTES, cpu=4 * VOCABULARY * rows):
        found = one_step(**arguments)
    inseparable = len(heads._IN_PLACE_MODELS)
    heads._IN_PLACE_MODELS.clear()
    return found | {"inseparable": inseparable}
