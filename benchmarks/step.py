"""Measure the time of a step on one device: written by hand, TorchEngine and DeepSpeedEngine.

    python -m benchmarks.step [--shape 100m] [--precision bf16] [--presets zero0,zero2]

All take the same micro-batches from the same weights. Losses and gradient norms are compared before anything is timed. A
ratio compares times within one round of one process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import join_alone, made_batches, made_engine, made_model, made_task, ratio, run, take_turns
from dstrain.batch import Batch
from dstrain.training.engine.torch import TorchEngine

Step = tuple[float, float]  # (mean loss, gradient norm)


class ByHand:
    """A step in plain PyTorch around the task's loss, without dstrain's engines."""

    def __init__(self, task: Any, device: torch.device, precision: str) -> None:
        objective, groups = made_model(task)
        self.task, self.model, self.device = task, objective.model.to(device), device
        self.clip, self.bf16 = task.recipe.optim.clip, precision == "bf16"
        params = [{"params": group.params, "weight_decay": group.weight_decay} for group in groups]
        optim = task.recipe.optim
        self.optimizer = torch.optim.AdamW(
            params, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=device.type == "cuda"
        )

    def step(self, batches: Sequence[Batch], lr: float) -> Step:
        self.model.train()
        weight, loss = sum(batch.weight for batch in batches), 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for batch in batches:
            with torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext():
                total = self.task.loss(self.model, batch.to(self.device)).total.float()
            (total / weight).backward()
            loss = loss + total.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss) / weight, float(norm)


def taken(engine: Any, batches: Sequence[Batch], lr: float) -> Step:
    """Take one step of an engine; return loss and norm."""
    result = engine.step(batches, lr)
    return result if isinstance(result, tuple) else (float(result.loss) / result.weight, float(result.grad_norm))


def differences(engines: dict[str, Any], batches: Sequence[Sequence[Batch]], lr: float, limit: float) -> float:
    """Return the largest relative difference to the step by hand. Raises AssertionError above the limit."""
    worst = 0.0
    for number, step in enumerate(batches):
        told = {name: taken(engine, step, lr) for name, engine in engines.items()}
        wanted = told["by hand"]
        for name, found in told.items():
            apart = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, wanted, strict=True))
            assert math.isfinite(apart), f"step {number + 1}: {name} has (loss, norm) {found}"
            assert apart <= limit, f"step {number + 1}: {name} has (loss, norm) {found}, by hand {wanted}"
            worst = max(worst, apart)
    return worst


def measure(
    *, shape: str = "3m", length: int = 128, micro: int = 4, accumulate: int = 2, precision: str = "fp32",
    presets: str = "zero0,zero2", rounds: int = 20, checked_steps: int = 5
) -> dict[str, Any]:  # fmt: skip
    """Check that the losses are equal, then time the steps. Collective (of one)."""
    world = join_alone()
    task = made_task(shape, length, changes={"model": {"gradient_checkpointing": False}})
    engines: dict[str, Any] = {"by hand": ByHand(task, world.device, precision)}
    if precision == "fp32":  # TorchEngine is the reference, in fp32
        engines["TorchEngine"] = TorchEngine(*made_model(task), task.recipe.optim, world.device)
    for preset in presets.split(","):
        engines[f"DeepSpeed {preset}"] = made_engine(
            task, preset, world, precision=precision, micro=micro, accumulate=accumulate
        )
    lr, limit = task.recipe.optim.lr, 1e-4 if precision == "fp32" else 5e-2
    batches = made_batches(task, checked_steps, micro, accumulate)
    worst = differences(engines, batches, lr, limit)
    runners = {
        name: (lambda turn, engine=engine: taken(engine, batches[turn % len(batches)], lr))
        for name, engine in engines.items()
    }
    seconds = take_turns(runners, rounds, 2, world.device)
    tokens = sum(batch.tokens for step in batches for batch in step) / len(batches)
    rows = []
    for name in engines:
        row = ratio(seconds, name, "by hand")
        rows.append({"engine": name, **row, "tokens_per_second": tokens / row["median_ms"] * 1000})
    return {
        "settings": {
            "shape": shape,
            "length": length,
            "micro": micro,
            "accumulate": accumulate,
            "precision": precision,
            "rounds": rounds,
        },
        "checked": f"loss and gradient norm of {checked_steps} steps are within {worst:.1e} of the step by hand (limit {limit:g})",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
