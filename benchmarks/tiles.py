"""Measure time and peak memory of a step with MLPs and norms in tiles, and without; every layer is recomputed.

python -m benchmarks.tiles [--shape 100m] [--length 4096] [--tile 1024]
"""

from __future__ import annotations

from typing import Any

from benchmarks.checkpointing import largest_difference, measure_peaks, memory_columns
from benchmarks.common import join_alone, made_batches, made_model, made_task, ratio, run, take_turns
from dstrain.training.engine.torch import TorchEngine


def measure(
    *, shape: str = "3m", length: int = 1024, micro: int = 4, tile: int = 2048, rounds: int = 10, checked_steps: int = 2
) -> dict[str, Any]:
    """Check that the losses are equal, then measure memory and time, in fp32."""
    world = join_alone()
    engines: dict[str, Any] = {}
    for name, tiled in {"whole": False, "in tiles": tile}.items():
        changes = {"model": {"tiled_mlp": tiled}, "batch": {"micro": micro}}
        task = made_task(shape, length, changes=changes)
        engines[name] = TorchEngine(*made_model(task), task.recipe.optim, world.device)
    lr, batches = task.recipe.optim.lr, made_batches(task, checked_steps, micro)
    worst = largest_difference(engines, batches, lr)
    assert worst <= 1e-5, f"tiles change the step by {worst:.1e}"
    runners = {
        name: (lambda turn, engine=engine: engine.step(batches[turn % len(batches)], lr))
        for name, engine in engines.items()
    }
    memory, seconds = measure_peaks(runners, world.device), take_turns(runners, rounds, 1, world.device)
    return {
        "settings": {"shape": shape, "length": length, "micro": micro, "tile": tile, "rounds": rounds},
        "checked": f"loss and gradient norm of {checked_steps} steps differ by at most {worst:.1e} (limit 1e-5)",
        "rows": [
            {"pass": name, **ratio(seconds, name, "whole"), **memory_columns(memory, name, "whole", "step_memory_mib")}
            for name in engines
        ],
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
