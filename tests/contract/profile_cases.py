"""Worker functions of the profiler tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from dstrain.training import profiler
from tests.parity.cases import world
from tests.resume.cases import run


def run_with_broken_profilers(recipe: str, run_dir: str, sets: Sequence[str]) -> dict[str, Any]:
    """Train while rank 0's flops table cannot start and rank 1's trace cannot be written."""

    def broken(*arguments: Any) -> None:
        raise OSError("no room")

    place = ("FlopsTable", "__init__") if world().rank == 0 else ("Trace", "write")
    with patch.object(getattr(profiler, place[0]), place[1], broken):
        return run(recipe, run_dir, sets)


class ByName(torch.nn.Module):
    """Calls that a counter may not know (by keyword, attention, LSTM) and a layer that each knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.rnn = torch.nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.mul(input=self.layer(x), other=x)  # (B, T, 4)
        x = F.scaled_dot_product_attention(query=x, key=x, value=x)
        return self.rnn(x)[0]


def table_of_one_pass(path: str) -> tuple[bool, str]:
    """Whether the output is the same under the table, and the table."""
    torch.manual_seed(0)
    model, x = ByName(), torch.randn(2, 3, 4)
    before = model(x)
    table = profiler.FlopsTable(model, 7)
    during = model(x)
    model(x)  # it is not counted
    table.write(Path(path))
    return torch.equal(before, during), Path(path).read_text()
