"""The measurements run, and compare before they time. What they measure is no claim of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import table, tell
from tests.workers import Workers

TINY: dict[str, dict[str, Any]] = {
    "step": {"shape": "tiny", "rounds": 2, "checked_steps": 2, "length": 48, "micro": 2},
    "loader": {"shape": "tiny", "rounds": 1, "steps": 3, "length": 48, "micro": 2, "decode_ms": 0.2},
    "checkpointing": {"shape": "tiny", "rounds": 2, "checked_steps": 2, "length": 48, "micro": 2},
    "saving": {"shape": "tiny", "rounds": 1, "length": 48},
    "vision": {"shape": "tiny", "rounds": 2, "length": 24, "micro": 2},
    "frozen_encoder": {"shape": "tiny", "rounds": 2, "length": 24, "micro": 2},
    "head": {"vocabulary": 400, "hidden": 16, "length": 24, "micro": 2, "rounds": 2},
    "attention": {"heads": 2, "kv_heads": 1, "width": 8, "rounds": 2, "shortest": True},
    "images": {"photos": 2, "width": 64, "height": 48, "side": 28, "micro": 2, "rounds": 2},
}
ROWS = {
    "step": ["by hand", "TorchEngine", "DeepSpeed zero0", "DeepSpeed zero2"],
    "loader": [0.0, 0.0, 0.2, 0.2],
    "checkpointing": ["off", "half of the layers", "on"],
    "saving": ["waiting", "behind"],
    "vision": ["every token", "answers", "checkpointing"],
    "frozen_encoder": ["input gradients", "none"],
    "head": ["all logits", "chunks", "linear"],
    "attention": ["1 x 64+32+32"] * 6,
    "images": ["files", "copies"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_measurement_checks_first_and_gives_a_row_each(name: str, one: Workers, tmp_path: Path, capsys: Any) -> None:
    result = one(f"benchmarks.{name}:measure", **TINY[name])[0]
    assert [next(iter(row.values())) for row in result["rows"]] == ROWS[name]
    assert result["checked"]
    tell(result, tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["rows"] == result["rows"]
    assert all(told["certificate"][key] for key in ("hardware", "command", "date", "commit", "versions"))
    assert table(result["rows"]) in capsys.readouterr().out


def test_losses_that_differ_are_never_timed(one: Workers) -> None:
    with pytest.raises(AssertionError, match="by hand"):
        one("tests.benchmarks.test_benchmarks:measure_unequal")


def measure_unequal() -> None:
    """In a worker: an engine that tells another loss than the step by hand."""
    import torch

    from benchmarks.common import made_batches, made_model, made_task
    from benchmarks.step import ByHand, differences
    from dstrain.training.engine.torch import TorchEngine

    task, device = made_task("tiny", 48), torch.device("cpu")
    other = _Doubled(TorchEngine(*made_model(task), task.recipe.optim, device))
    differences({"by hand": ByHand(task, device, "fp32"), "other": other}, made_batches(task, 1, 2), 1e-3, 1e-4)


class _Doubled:
    """An engine whose loss is twice what it is."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, batches: Any, lr: float) -> tuple[float, float]:
        result = self._engine.step(batches, lr)
        return 2 * float(result.loss) / result.weight, float(result.grad_norm)
