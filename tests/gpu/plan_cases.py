"""Runs whose peak memory is predicted: each (recipe, preset, cap) is a process of its own.

python -m tests.gpu.plan_cases --measure '{"preset": "zero2", "cap": 24, …}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.common import ROOT, made_batches, made_engine, made_task

MARK = "measured: "
CONTEXT_GIB = 0.7
"""Of a card, for what torch's allocator does not count: the plan's line."""
RUNS: tuple[dict[str, Any], ...] = tuple(
    {"shape": shape, "length": length, "micro": micro, "preset": preset, "checkpointing": checkpointing, "lora": lora}
    for shape, length, micro, preset, checkpointing, lora in (
        ("100m", 1024, 4, "zero0", True, False),
        ("100m", 1024, 4, "zero1", False, False),
        ("100m", 2048, 2, "zero2", False, False),
        ("100m", 512, 8, "zero3", True, False),
        ("100m", 1024, 4, "zero2", False, True),
        ("1b", 1024, 1, "zero0", True, False),
        ("1b", 1024, 1, "zero1", True, False),
        ("1b", 1024, 2, "zero2", True, False),
        ("1b", 512, 2, "zero2_offload", True, False),
        ("1b", 1024, 2, "zero3", True, False),
        ("1b", 2048, 1, "zero3_offload", True, False),
        ("1b", 1024, 2, "zero2", True, True),
        ("1b", 2048, 2, "zero2", False, True),
    )
)
"""Runs in bf16 with AdamW; rows have nearly `length` tokens. `rm`: pairs, so a sample is two rows."""


def made(run: dict[str, Any]) -> Any:
    """Return the task of a run."""
    model = {"gradient_checkpointing": run["checkpointing"], "lora": {"rank": 16} if run["lora"] else None}
    batch = {"packing": False, "micro": run["micro"]}
    return made_task(run["shape"], run["length"], pairs=16, changes={"model": model, "batch": batch})


def predict(run: dict[str, Any]) -> Any:
    """Return the plan of a run on one GPU."""
    from dstrain.planner.memory import plan_memory
    from dstrain.planner.workload import Cluster
    from dstrain.preset import read_preset

    config = made(run).recipe.model_copy(update={"precision": "bf16"})
    return plan_memory(config, read_preset(run["preset"]), Cluster())


def measure(*, cap: float | None, steps: int = 3, **run: Any) -> dict[str, Any]:
    """Build the engine and take steps; return the peak, or `fits: False` where the allocator gave up."""
    import torch

    from benchmarks.common import join_alone, wait_for

    if cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap - CONTEXT_GIB) * 2**30 / total), 0)
    try:
        world = join_alone()
        task = made(run)
        engine = made_engine(task, run["preset"], world, precision="bf16", micro=run["micro"])
        torch.cuda.reset_peak_memory_stats(0)
        for step in made_batches(task, steps, run["micro"]):
            engine.step(step, 1e-5)
        wait_for(world.device)
    except torch.OutOfMemoryError as fault:
        return {"fits": False, "why": str(fault).splitlines()[0]}
    return {"fits": True, "peak": torch.cuda.max_memory_allocated(0)}


def apart(seconds: float = 240.0, **wish: Any) -> dict[str, Any]:
    """Return what `measure` returns in a process of its own."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "tests.gpu.plan_cases", "--measure", json.dumps(wish)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ranks}, capture_output=True, text=True, timeout=seconds, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads(lines[-1].removeprefix(MARK)))


def main() -> None:
    from dstrain.distributed.world import destroy_process_groups

    try:
        print(MARK + json.dumps(measure(**json.loads(sys.argv[2]))), flush=True)
    finally:
        destroy_process_groups()


if __name__ == "__main__":
    main()
