"""Measure time and peak memory of a step with gradient checkpointing in no layer, in half of them, and in all.

    python -m benchmarks.checkpointing [--shape 100m] [--length 1024]

Memory is what a step needs in addition to weights and optimizer: on a GPU the allocator's peak, on a CPU the increase of
the process's resident memory, from the kernel's high-water mark.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
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
from dstrain.training.engine.torch import TorchEngine

MIB = 2**20


class Peak:
    """Peak memory between `start` and `rise`, minus the memory at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._held = device, 0

    def start(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            wait_for(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
            return
        # Return free memory to the kernel, so that it is counted when it is used again.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; man 5 proc
        self._held = resident_bytes("VmRSS")

    def rise(self) -> float:
        """Return the increase since `start` in MiB."""
        if self._device.type == "cuda":
            return (torch.cuda.max_memory_allocated(self._device) - self._held) / MIB
        return (resident_bytes("VmHWM") - self._held) / MIB


def measure_peaks(
    runners: Mapping[str, Callable[[int], Any]], device: torch.device, prepare: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Return name -> median of the increase in MiB over three calls; `prepare` runs before each."""
    peak, rises = Peak(device), {name: [] for name in runners}
    for _ in range(3):
        for name, runner in runners.items():
            prepare()
            peak.start()
            runner(0)
            rises[name].append(peak.rise())
    return {name: statistics.median(values) for name, values in rises.items()}


def memory_columns(memory: Mapping[str, float], name: str, base: str, column: str) -> dict[str, float | None]:
    """Return the columns of a row: memory, and its ratio to that of `base`."""
    return {column: memory[name], "memory_ratio": memory[name] / memory[base] if memory[base] else None}


def resident_bytes(name: str) -> int:
    """Return a value of /proc/self/status, such as VmRSS, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024


def largest_difference(engines: Mapping[str, Any], batches: Sequence[Any], lr: float) -> float:
    """Take the steps; return the largest relative difference of loss or gradient norm to those of the first engine."""
    worst = 0.0
    for step in batches:
        results = [engine.step(step, lr) for engine in engines.values()]
        for one in results[1:]:
            for a, b in ((one.loss, results[0].loss), (one.grad_norm, results[0].grad_norm)):
                worst = max(worst, abs(float(a) - float(b)) / max(abs(float(b)), 1e-3))
    return worst


def measure(
    *,
    shape: str = "3m",
    length: int = 256,
    micro: int = 4,
    precision: str = "fp32",
    rounds: int = 10,
    checked_steps: int = 3,
) -> dict[str, Any]:
    """Check that the losses are equal, then measure memory and time. fp32: TorchEngine, else DeepSpeed zero0."""
    world = join_alone()
    engines: dict[str, Any] = {}
    for name, value in {"off": False, "half of the layers": 0.5, "on": True}.items():
        task = made_task(shape, length, changes={"model": {"gradient_checkpointing": value}})
        if precision == "fp32":
            engines[name] = TorchEngine(*made_model(task), task.recipe.optim, world.device)
        else:
            engines[name] = made_engine(task, "zero0", world, precision=precision, micro=micro)
    lr, batches = task.recipe.optim.lr, made_batches(task, checked_steps, micro)
    limit = 1e-5 if precision == "fp32" else 2e-2
    worst = largest_difference(engines, batches, lr)
    assert worst <= limit, f"checkpointing changes the step by {worst:.1e}"
    runners = {
        name: (lambda turn, engine=engine: engine.step(batches[turn % len(batches)], lr))
        for name, engine in engines.items()
    }
    memory, seconds = measure_peaks(runners, world.device), take_turns(runners, rounds, 1, world.device)
    rows = [
        {"checkpointing": name, **ratio(seconds, name, "off"), **memory_columns(memory, name, "off", "step_memory_mib")}
        for name in engines
    ]
    return {
        "settings": {"shape": shape, "length": length, "micro": micro, "precision": precision, "rounds": rounds},
        "checked": f"loss and gradient norm of {checked_steps} steps with and without differ by at most {worst:.1e} (limit {limit:g})",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
