"""What the workers of test_families do: one step with few rows of logits at a time."""

from __future__ import annotations

from typing import Any
from unittest import mock

from dstrain.models.heads import chunked_lm_head
from tests.parity.cases import one_step

VOCABULARY = 320


def step_in_chunks(rows: int, **arguments: Any) -> dict[str, Any]:
    """`one_step` with so many rows of logits in a chunk, and how many models did not run their head in chunks. Collective."""
    with mock.patch.dict(chunked_lm_head.MAX_CHUNK_BYTES, cpu=4 * VOCABULARY * rows):
        found = one_step(**arguments)
    inseparable = len(chunked_lm_head._IN_PLACE_MODELS)
    chunked_lm_head._IN_PLACE_MODELS.clear()
    return found | {"inseparable": inseparable}
