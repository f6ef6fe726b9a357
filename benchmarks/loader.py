"""Measure the share of time spent waiting for data, with 0 and 4 loader workers.

    python -m benchmarks.loader [--decode-ms 5]

`--decode-ms` adds a sleep per sample to simulate reading an image. It needs no core, like a disk or a decoder that releases
the GIL. Both must see the same samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import join_alone, made_model, made_task, run, wait_for
from dstrain.data.loading.loader import Loader, StepSampler
from dstrain.training.engine.torch import TorchEngine

Rounds = list[tuple[float, float]]
"""(seconds, seconds spent waiting) of each round."""


@dataclass(frozen=True)
class Slow:
    """Examples with a delay per read."""

    examples: Sequence[Any]
    seconds: float

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        if self.seconds:
            time.sleep(self.seconds)
        return self.examples[index]


def made_loader(task: Any, workers: int, decode_ms: float, batch: tuple[int, int, int], pin: bool) -> Loader:
    """Return a loader; `batch` is (micro, accumulate, steps)."""
    examples = Slow(task.examples("train"), decode_ms / 1000)
    micro, accumulate, steps = batch
    total = micro * accumulate
    plan = StepSampler(
        sizes=(len(examples),),
        seed=0,
        samples_per_step=total,
        world_size=1,
        accumulate=accumulate,
        total_samples=total * steps,
    )
    return Loader(examples=examples, collate=task.collate, sampler=plan, workers=workers, pin_memory=pin)


def check_order(task: Any, workers: Sequence[int], batch: tuple[int, int, int]) -> int:
    """Check that all loaders yield the same samples; return how many."""
    seen = [
        [b.samples for step in made_loader(task, count, 0.0, batch, False).iter_steps(0) for b in step.batches]
        for count in workers
    ]
    assert all(found == seen[0] for found in seen), f"workers {workers}: {seen}"
    return sum(len(samples) for samples in seen[0])


def take(loader: Loader, engine: Any, lr: float) -> tuple[float, float]:
    """Return (seconds, seconds spent waiting) of all steps but the first, which cannot be read ahead."""
    steps = loader.iter_steps(0)
    engine.step(next(steps).batches, lr)
    loader.pop_wait_seconds()
    wait_for(engine.world.device)
    began = time.perf_counter()
    for step in steps:
        engine.step(step.batches, lr)
    wait_for(engine.world.device)
    return time.perf_counter() - began, loader.pop_wait_seconds()


def measure(
    *,
    shape: str = "3m",
    length: int = 128,
    micro: int = 4,
    accumulate: int = 2,
    steps: int = 10,
    rounds: int = 3,
    decode_ms: float = 5.0,
) -> dict[str, Any]:
    """Check that the order is the same, then measure the waiting times in turns."""
    world = join_alone()
    task, batch, workers = made_task(shape, length), (micro, accumulate, steps), (0, 4)
    samples = check_order(task, workers, batch)
    engine = TorchEngine(*made_model(task), task.recipe.optim, world.device)
    costs = [0.0] if not decode_ms else [0.0, decode_ms]
    told: dict[tuple[float, int], Rounds] = {(cost, count): [] for cost in costs for count in workers}
    for turn in range(rounds):
        for cost, count in list(told) if turn % 2 else list(told)[::-1]:
            loader = made_loader(task, count, cost, batch, world.device.type == "cuda")
            told[cost, count].append(take(loader, engine, task.recipe.optim.lr))
    return {
        "settings": {
            "shape": shape,
            "length": length,
            "micro": micro,
            "accumulate": accumulate,
            "steps": steps,
            "rounds": rounds,
        },
        "checked": f"workers {workers} give the same {samples} samples in the same micro-batches",
        "rows": [make_row(told, cost, count, max(steps - 1, 1)) for cost, count in told],
    }


def make_row(told: Mapping[tuple[float, int], Rounds], cost: float, count: int, steps: int) -> dict[str, Any]:
    """Return the row of one decoding cost and number of workers from (seconds, seconds waited) of each round."""
    seconds, waited = (sum(values) for values in zip(*told[cost, count], strict=True))
    return {
        "decode_ms": cost,
        "workers": count,
        "wait_share": waited / seconds,
        "step_ms": seconds / len(told[cost, count]) / steps * 1000,
        "time_over_workers_0": seconds / sum(pair[0] for pair in told[cost, 0]),
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
