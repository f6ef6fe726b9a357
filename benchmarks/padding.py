"""Measure padding and its cost: the samples of a step in file order, and sorted by length.

    python -m benchmarks.padding --data ../shared/data/hh/helpful-train.jsonl [--task sft] [--micro 8]

Both take the same samples in every step and must have the same loss and gradient norm. A ratio compares the times of the
same step, taken in turns in one process of plain PyTorch.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import SHAPES, made_model, ratio, run, take_turns
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import StepSampler, make_batch
from dstrain.data.loading.micro_batches import make_cost_function
from dstrain.tasks import make_task
from dstrain.training.engine.torch import TorchEngine

WAYS = ("as they come", "sorted")


def write_uneven(path: Path, count: int) -> Path:
    """Write `count` synthetic preference pairs of one to forty words."""
    draw = random.Random(0)
    say = lambda words: " ".join([words] * draw.randint(1, 20))  # noqa: E731
    rows = [
        {"prompt": f"What about {index}?", "chosen": say("oil it"), "rejected": say("leave it")}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def real_share(plan: StepSampler, task: Any, examples: Any) -> float:
    """Return the share of tokens that are not padding, over the forward passes of an epoch."""
    real = taken = 0
    for samples in range(0, plan.samples_per_epoch, plan.samples_per_step):
        for ids in filter(None, (ids for ids, _ in plan.micro_batches(plan.step_ids(samples), samples, 0))):
            batch = make_batch(examples, task.collate, ids, 0)
            real, taken = real + batch.tokens, taken + batch.tensors["input_ids"].numel()
    return real / taken


def measure(*, task: str = "rm", data: str = "", shape: str = "3m", length: int = 512, micro: int = 4,
            total: int = 64, rounds: int = 6) -> dict[str, Any]:  # fmt: skip
    """Check that the losses are equal, then time complete steps."""
    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    train = data or str(write_uneven(folder / "train.jsonl", 4 * total))
    made: Any = make_task(RunConfig.model_validate({
        "task": task,
        "model": {"config": {"model_type": "llama", **SHAPES[shape]}, "gradient_checkpointing": False,
                  "tokenizer": {"train": "bpe", "vocab_size": 320 if shape == "tiny" else 2048}},
        "data": {"train": train, "max_length": length}, "optim": {"lr": 1e-5},
    }))  # fmt: skip
    examples = made.examples("train")
    sorted_plan = StepSampler(sizes=examples.sizes, seed=0, samples_per_step=total, world_size=1, accumulate=-(-total // micro),
                           costs=make_cost_function(examples, made.packing))  # fmt: skip
    plans = dict(zip(WAYS, (replace(sorted_plan, costs=None), sorted_plan), strict=True))
    engine = TorchEngine(*made_model(made), made.recipe.optim, torch.device("cpu"))
    batches = {
        name: [
            [
                make_batch(examples, made.collate, ids, 0)
                for ids, _ in plan.micro_batches(plan.step_ids(step * total), step * total, 0)
            ]
            for step in range(3)
        ]
        for name, plan in plans.items()
    }
    worst = difference(engine, batches)
    runners = {name: (lambda turn, steps=steps: engine.step(steps[turn % 3], 0.0)) for name, steps in batches.items()}
    seconds = take_turns(runners, rounds, 1, torch.device("cpu"))
    rows = [
        {"samples of a step": name, "real tokens": real_share(plan, made, examples), **ratio(seconds, name, WAYS[0])}
        for name, plan in plans.items()
    ]
    return {
        "settings": {"task": task, "shape": shape, "length": length, "micro": micro, "total": total, "rounds": rounds},
        "checked": f"ids of 3 steps are equal, loss and gradient norm within {worst:.1e} (limit 1e-5)",
        "rows": rows,
    }


def difference(engine: TorchEngine, batches: Mapping[str, list[list[Any]]]) -> float:
    """Return the largest relative difference of losses and gradient norms. Raises AssertionError if samples or sums differ."""
    worst = 0.0
    for steps in zip(*batches.values(), strict=True):
        ids = [sorted(sample for batch in step for sample in batch.samples) for step in steps]
        assert ids[0] == ids[1], "the same samples"
        one, other = ((float(told.loss), float(told.grad_norm)) for told in (engine.step(step, 0.0) for step in steps))
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(other, one, strict=True)))
    assert worst <= 1e-5, f"loss or gradient norm differ by {worst:.1e}"
    return worst


if __name__ == "__main__":
    run(measure, __doc__ or "")
