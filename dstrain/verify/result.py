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


def difference(measured: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value; inf where the shapes differ."""
    if measured.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    exact, wanted = measured.detach().double(), expected.detach().double()
    return float((exact - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30)


def distance(measured: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the relative distance of two gradients or updates, and the parameter that differs the most."""
    errors: dict[str, float] = {}
    for name in measured.keys() | expected.keys():
        pair = [values[name].double() for values in (measured, expected) if name in values]
        # A parameter without a gradient has one of zero.
        errors[name] = float((pair[0] - pair[1] if len(pair) == 2 else pair[0]).square().sum())
    size = math.sqrt(sum(float(value.double().square().sum()) for value in expected.values()))
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name], default="")
    return math.sqrt(sum(errors.values())) / max(size, 1e-30), worst


def worst_of(figures: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest figure and what it is of; nan before all."""
    return max(figures, key=lambda figure: math.inf if math.isnan(figure[0]) else figure[0])
