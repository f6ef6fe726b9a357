"""What gradient checkpointing costs and saves: the time and the peak memory of a step, with and without.

    python -m benchmarks.checkpointing [--shape 100m] [--length 1024]

Memory is what a step takes on top of what is held before it (weights, optimizer): on a GPU the allocator's peak, on a CPU the
rise of the process's resident memory, read from the kernel's own high-water mark.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    join_alone,
    made_batches,
    made_engine,
    made_model,
    made_task,
    ratio,
    run,
    take_turns,
    wait_for,
)
from dstrain.train.engine.torch import TorchEngine

MIB = 2**20


class Peak:
    """The most memory between `start` and `rise`, above what was held at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._held = device, 0

    def start(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            wait_for(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
            return
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that it counts again when it is taken
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew; man 5 proc
        self._held = _resident("VmRSS")

    def rise(self) -> float:
        """MiB."""
        if self._device.type == "cuda":
            return (torch.cuda.max_memory_allocated(self._device) - self._held) / MIB
        return (_resident("VmHWM") - self._held) / MIB


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024


def measure(
    *,
    shape: str = "3m",
    length: int = 256,
    micro: int = 4,
    precision: str = "fp32",
    rounds: int = 10,
    checked_steps: int = 3,
) -> dict[str, Any]:
    """Equal losses first, then memory, then times in turns. fp32 with TorchEngine, else DeepSpeed's zero0."""
    world = join_alone()
    engines: dict[str, Any] = {}
    for name, on in (("off", False), ("on", True)):
        task = made_task(shape, length, changes={"model": {"gradient_checkpointing": on}})
        if precision == "fp32":
            engines[name] = TorchEngine(*made_model(task), task.recipe.optim, world.device)
        else:
            engines[name] = made_engine(task, "zero0", world, precision=precision, micro=micro)
    lr, batches = task.recipe.optim.lr, made_batches(task, checked_steps, micro)
    limit = 1e-5 if precision == "fp32" else 2e-2
    worst = 0.0
    for step in batches:
        off, on = (engines[name].step(step, lr) for name in ("off", "on"))
        for a, b in ((float(on.loss), float(off.loss)), (float(on.grad_norm), float(off.grad_norm))):
            worst = max(worst, abs(a - b) / max(abs(b), 1e-3))
        assert worst <= limit, f"checkpointing changes the step by {worst:.1e}"
    peak, rises = Peak(world.device), {name: [] for name in engines}
    for _ in range(3):
        for name, engine in engines.items():
            peak.start()
            engine.step(batches[0], lr)
            rises[name].append(peak.rise())
    memory = {name: statistics.median(values) for name, values in rises.items()}
    runners = {
        name: (lambda turn, engine=engine: engine.step(batches[turn % len(batches)], lr))
        for name, engine in engines.items()
    }
    seconds = take_turns(runners, rounds, 1, world.device)
    rows = [
        {"checkpointing": name, **ratio(seconds, name, "off"), "step_memory_mib": memory[name],
         "memory_ratio": memory[name] / memory["off"] if memory["off"] else None}
        for name in engines
    ]  # fmt: skip
    return {
        "settings": {"shape": shape, "length": length, "micro": micro, "precision": precision, "rounds": rounds},
        "checked": f"loss and gradient norm of {checked_steps} steps with and without differ by at most {worst:.1e} (limit {limit:g})",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "", shape="3m", length=256, micro=4, precision="fp32", rounds=10)
