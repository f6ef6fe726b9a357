"""Count the kernels of an optimizer step at two depths of a model, on an emulated CUDA device.

    python -m tools.cuda_emulator python -m benchmarks.step_launches --to docs/measurements/step-launches.md

One process, one micro-batch in a step. `update` is all that follows the backward pass: norm, clipping, casts, the
optimizer's update, zeroing. `gradients` is what the backward pass launches beyond that of the same model without an
engine: copies of gradients into buffers, and at stage 3 of weights.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import (
    SHAPES,
    format_certificate,
    join_alone,
    made_batches,
    made_engine,
    made_model,
    made_task,
    table,
    write_table,
)
from tools.cuda_emulator.counts import read_counts

DEPTHS = (2, 8)
"""Decoder layers of the two models; each layer has 9 tensors, or 14 of adapters."""
WARMUP_STEPS = 2
"""Steps in which buffers and states are made."""
LAUNCHES = ("kernels", "copies_on_device", "memsets")
"""Counts of what the device runs one after the other."""
LENGTH = 48
PRESETS = ("zero0", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class StepRun:
    """An optimizer at one preset and precision."""

    optimizer: str
    preset: str
    precision: str
    lora: bool = False
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """The run's name in the table."""
        lora = ", LoRA" if self.lora else ""
        return f"{self.optimizer}{lora}" + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")


def count_update(run: StepRun, depth: int, world: Any) -> dict[str, int]:
    """Return the kernels of `update` and `gradients` of the last of a few steps."""
    task = _make_task(run, depth)
    batches = made_batches(task, WARMUP_STEPS + 1, 2, run.micro_batches)
    plain = _count_plain_passes(run, task, batches[0][0], world)
    settings = {"precision": run.precision, "accumulate": run.micro_batches, "uses_muon": run.optimizer == "muon"}
    engine = made_engine(task, run.preset, world, **settings)
    if run.precision == "fp16":
        engine.engine.optimizer.loss_scaler.cur_scale = 2.0**10  # with the first scale, 2^16, steps are skipped
    updates: list[int] = []
    launched: list[int] = []
    deepspeed_step, clip = engine.engine.step, engine._clip_grad_norm
    engine.engine.step = _counted(deepspeed_step, updates)
    engine._clip_grad_norm = _counted(clip, updates)
    for batch in batches:
        updates.clear()
        launched.clear()
        _counted(engine.step, launched)(batch, 1e-3)
    update = sum(updates)
    return {"update": update, "gradients": launched[0] - update - run.micro_batches * plain}


def _make_task(run: StepRun, depth: int) -> Any:
    config = {"model_type": "llama", **SHAPES["tiny"], "num_hidden_layers": depth, "hidden_size": 64}
    model: dict[str, Any] = {"config": config, "gradient_checkpointing": False}
    if run.lora:
        model["lora"] = {"rank": 4, "alpha": 8}
    clip = 0.0 if run.optimizer == "muon" else 1.0
    return made_task("tiny", LENGTH, 16, {"model": model, "optim": {"name": run.optimizer, "clip": clip}})


def _count_plain_passes(run: StepRun, task: Any, batch: Any, world: Any) -> int:
    """Return the kernels of a forward and a backward pass without DeepSpeed."""
    import torch

    from dstrain.training.engine.module import scale_loss_or_nan

    module, _ = made_model(task)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.precision]
    module.to(world.device, dtype).train()
    launched: list[int] = []

    def passes() -> None:
        total, _ = module(batch.to(world.device))
        scale_loss_or_nan(total, 1.0).backward()

    for _ in range(WARMUP_STEPS):
        module.zero_grad(set_to_none=True)
        launched.clear()
        _counted(passes, launched)()
    return launched[0]


def _counted(function: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """Return the function, each call of which appends its kernels."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = _count_launches()
        result = function(*args, **kwargs)
        counts.append(_count_launches() - before)
        return result

    return call


def _count_launches() -> int:
    counts = read_counts()
    return sum(counts[name] for name in LAUNCHES)


def all_runs() -> list[StepRun]:
    """Return the runs of the table; stage 0 refuses fp16."""
    adamw = [StepRun("adamw", preset, precision) for precision in PRECISIONS for preset in PRESETS]
    others = [
        StepRun(optimizer, preset, "bf16", lora)
        for optimizer, lora in (
            ("adamw", True),
            ("adamw_8bit", False),
            ("muon", False),
            ("lion", False),
            ("sgd", False),
            ("adafactor", False),
        )
        for preset in PRESETS
    ]
    summed = [StepRun("adamw", preset, "bf16", micro_batches=2) for preset in PRESETS]
    return [
        run
        for run in (*adamw, *summed, *others)
        if (run.preset, run.precision) != ("zero0", "fp16") and (run.optimizer != "adafactor" or run.preset == "zero0")
    ]


def count_growth(run: StepRun, world: Any) -> tuple[dict[str, int], dict[str, float]]:
    """Return the launches of `update` and `gradients` with the smaller depth, and those that each further layer adds."""
    shallow, deep = (count_update(run, depth, world) for depth in DEPTHS)
    return shallow, {part: (deep[part] - shallow[part]) / (DEPTHS[1] - DEPTHS[0]) for part in shallow}


def row_of(run: StepRun, world: Any) -> dict[str, Any]:
    """Return the row of a run: its launches with the smaller depth, and those that each further layer adds."""
    shallow, growth = count_growth(run, world)
    row: dict[str, Any] = {"optimizer": run.name, "precision": run.precision, "preset": run.preset}
    for part in shallow:
        row |= {part: shallow[part], f"{part}, each further layer": f"{growth[part]:.3g}"}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    parser.add_argument("--only", default="", help="runs whose row begins so: `adamw zero0 bf16`, or a part of it")
    options = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    world = join_alone()
    rows = [row_of(run, world) for run in all_runs() if _is_wanted(run, options.only.split())]
    record = format_certificate()
    write_table(f"{record}\n\n{table(rows)}", "benchmarks.step_launches", options.to)


def _is_wanted(run: StepRun, words: Sequence[str]) -> bool:
    return all(
        word in (run.optimizer, run.preset, run.precision, "LoRA" if run.lora else "", str(run.micro_batches))
        for word in words
    )


if __name__ == "__main__":
    main()
