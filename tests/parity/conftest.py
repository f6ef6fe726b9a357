"""What tests of equal steps share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.test_step import SGD
from tests.workers import Workers


@pytest.fixture(scope="module")
def definition(request: pytest.FixtureRequest, one: Workers) -> Any:
    """Return what plain PyTorch does with all of the module's SAMPLES in one padded batch; the argument: one of CASES."""
    found: dict[str, Any] = {}

    def of(case: str) -> Any:
        if case not in found:
            task, changes = request.module.CASES[case]
            found[case] = one(
                "tests.parity.cases:one_step", task=task, kind="torch", samples=request.module.SAMPLES, accumulate=1,
                changes=changes | SGD | {"batch": {"packing": False}},
            )[0]  # fmt: skip
        return found[case]

    return of
