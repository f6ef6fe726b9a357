"""What the workers of parity tests do: one step of a task on given samples, as any engine takes it."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.config.schema import RunConfig
from dstrain.data.loader import make_batch
from dstrain.models.freeze import freeze, parameter_groups
from dstrain.models.sharded import sharded_construction, whole
from dstrain.preset import RunSettings, complete, read_preset
from dstrain.tasks import Task, find_task, make_task
from dstrain.train.engine import DeepSpeedEngine, Objective, TorchEngine
from dstrain.world import SoloWorld, TorchWorld, World


@cache
def world() -> World:
    return TorchWorld(torch.device("cpu"), timedelta(minutes=9))


def tiny_task(name: str, changes: dict[str, Any] | None = None) -> Task:
    """A task with its tiny recipe; `changes` overrides sections."""
    folder = Path(tempfile.mkdtemp())
    recipe = find_task(name).tiny(folder)
    for key, value in (changes or {}).items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    return make_task(RunConfig.model_validate(recipe))


def ds_config(preset: str, settings: dict[str, Any]) -> dict[str, Any]:
    values = {"precision": "fp32", "micro": 1, "accumulate": 1, "world_size": 1, "clip": 0.0, "device_kind": "cpu",
              "foreign_optimizer": True, "nvme_path": tempfile.gettempdir()} | settings  # fmt: skip
    return complete(read_preset(preset), settings=RunSettings(**values))


def one_step(
    task: str,
    kind: str,
    samples: list[int],
    accumulate: int,
    changes: dict[str, Any] | None = None,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Sums and the gradient (as a step of SGD at a large rate shows it) of one step over the samples.

    `kind` is `torch` for the definition, else a preset's name. Every rank takes its share as the plan cuts it.
    """
    made = tiny_task(task, changes)
    examples = made.examples("train")
    optim = made.recipe.optim
    if kind == "torch":
        ranks: World = SoloWorld()
        model = made.build_model()
        freeze(model, made.recipe.model.freeze)
        engine: Any = TorchEngine(Objective(made, model), parameter_groups(model, optim), optim, torch.device("cpu"))
    else:
        ranks = world()
        config = ds_config(
            kind, {"accumulate": accumulate, "world_size": ranks.size, "clip": optim.clip, "precision": precision}
        )
        with sharded_construction(config):
            model = made.build_model()
        freeze(model, made.recipe.model.freeze)
        engine = DeepSpeedEngine(Objective(made, model), parameter_groups(model, optim), optim, config, ranks)
    before = weights(model)
    chunks = np.array_split(np.array(samples), ranks.size * accumulate)[
        ranks.rank * accumulate : (ranks.rank + 1) * accumulate
    ]
    batches = [make_batch(examples, made.collate, chunk.tolist(), samples[0]) for chunk in chunks]
    result = engine.step(batches, lr=optim.lr)
    after = weights(model)
    sums = ranks.sum(
        [float(result.loss), result.weight, *(float(v) for _, pair in sorted(result.metrics.items()) for v in pair)]
    )
    return {
        "sums": sums,
        "norm": result.grad_norm,
        "before": before,
        "gradient": {name: (before[name] - after[name]) / optim.lr for name in before},
    }


def weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Name -> whole parameter, float64. Collective."""
    with whole(model.parameters()):
        return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def rotary_frequencies(kind: str) -> list[str]:
    """Their type in a bf16 engine, and whether they are what a plain model has."""
    made = tiny_task("rm")
    config = ds_config(kind, {"world_size": world().size, "precision": "bf16"})
    with sharded_construction(config):
        model = made.build_model()
    DeepSpeedEngine(
        Objective(made, model), parameter_groups(model, made.recipe.optim), made.recipe.optim, config, world()
    )
    plain = dict(made.build_model().named_buffers())
    return [
        f"{value.dtype} {torch.equal(value, plain[name])}"
        for name, value in model.named_buffers()
        if "inv_freq" in name
    ]
