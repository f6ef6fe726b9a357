"""The result of a check, and how two computations of the same values are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

EXACT, SINGLE = 1e-6, 1e-5
"""Largest relative difference of computations in fp64, and of those in fp32."""
State = Literal["ok", "padded", "skipped", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one check."""

    check: str
    state: State
    """padded: the family's batches are padded, and the check was made so. refused: dstrain refuses it by name."""
    figure: float | None = None
    """Largest relative difference that was measured."""
    limit: float | None = None
    """Largest difference that rounding explains."""
    reason: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """False where a promise does not hold."""
        return self.state != "failed"


def judge(check: str, figure: float, limit: float, problem: str, note: str = "", state: State = "ok") -> CheckResult:
    """Return the result of a measured difference: `state` with the note, or failed with the problem."""
    # `not <=`, so that nan fails too.
    is_wrong = not figure <= limit
    return CheckResult(
        check=check,
        state="failed" if is_wrong else state,
        figure=figure,
        limit=limit,
        reason=problem if is_wrong else note,
    )


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value; inf where the shapes differ."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    largest = float(expected.detach().abs().max().double())
    return float((found.detach().double() - expected.detach().double()).abs().max()) / max(largest, 1e-30)


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the relative distance of two gradients or updates, and the parameter that differs the most."""
    squares, wrong, worst, where = 0.0, 0.0, -1.0, ""
    for name in expected.keys() | found.keys():
        one, other = (values.get(name) for values in (found, expected))
        one = torch.zeros_like(other) if one is None and other is not None else one
        assert one is not None, "each name is in one of the two"
        other = torch.zeros_like(one) if other is None else other
        error = float((one.double() - other.double()).square().sum())
        squares += float(other.double().square().sum())
        wrong += error
        if error > worst:
            worst, where = error, name
    return math.sqrt(wrong) / max(math.sqrt(squares), 1e-30), where


def worst_of(figures: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest figure and what it is of; nan before all."""
    return max(figures, key=lambda figure: math.inf if math.isnan(figure[0]) else figure[0])
