"""Updates with norms, casts and sums of many tensors together are those of DeepSpeed, tensor by tensor."""

from __future__ import annotations

import pytest

from tests.workers import Workers

CASES = [
    # preset, precision, optimizer, micro-batches
    ("zero0", "bf16", "sgd", 1),
    ("zero0", "bf16", "adamw", 2),
    ("zero0", "fp32", "adamw", 1),
    ("zero1", "bf16", "adamw", 2),  # another optimizer of DeepSpeed's
    ("zero1", "bf16", "sgd", 1),
    ("zero2", "bf16", "adamw", 2),
    ("zero2", "fp32", "sgd", 1),
    ("zero3", "bf16", "adamw", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["one", "two"])
@pytest.mark.parametrize(("preset", "precision", "optimizer", "micro_batches"), CASES)
def test_an_update_is_that_of_deepspeed(
    preset: str, precision: str, optimizer: str, micro_batches: int, processes: str, request: pytest.FixtureRequest
) -> None:
    workers: Workers = request.getfixturevalue(processes)
    arguments = {"preset": preset, "precision": precision, "optimizer": optimizer, "micro_batches": micro_batches}
    for distance in workers("tests.parity.update_cases:difference", **arguments):
        assert distance <= 1e-6
