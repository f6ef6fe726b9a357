"""Worker functions of test_updates."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import world
from tests.step_equality import compare_steps


def difference(**arguments: Any) -> float:
    """Return `compare_steps`. Collective."""
    return compare_steps(world(), **arguments)
