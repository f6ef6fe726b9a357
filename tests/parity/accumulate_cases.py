"""Worker functions of the accumulation tests: a bf16 step's gradient and the fp32 sum of its micro-batches' gradients."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.batch import Batch
from dstrain.data.loading.loader import make_batch
from dstrain.ds_config import RunSettings, complete_preset
from dstrain.models.params import build_param_groups, zero3_init
from dstrain.preset import read_preset
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from tests.parity.cases import tiny_task, world

LR = 1.0e6
"""Of one step of SGD: the weights' own rounding is nothing beside it."""


def error(preset: str, micro_batches: int) -> float:
    """Return ||g - g'|| / ||g|| of a step over `count` micro-batches per rank: g' of the engine, g the fp32 sum of
    the same bf16 gradients. Collective."""
    ranks = world()
    task = tiny_task("sft", {"optim": {"name": "sgd", "lr": LR, "clip": 0.0}, "precision": "bf16"})
    examples: Any = task.examples("train")
    mine = range(ranks.rank * micro_batches, (ranks.rank + 1) * micro_batches)
    batches = [make_batch(examples, task.collate, [sample % len(examples)], 0) for sample in mine]
    scale = 1 / ranks.sum([sum(batch.weight for batch in batches)])[0]
    settings = RunSettings(
        precision="bf16", micro=1, accumulate=micro_batches, world_size=ranks.size, clip=0.0, device_kind="cpu",
        uses_custom_optimizer=True,
    )  # fmt: skip
    found = _taken(task, complete_preset(read_preset(preset), settings=settings), batches)
    wanted = _summed(task, batches, scale * ranks.size)
    whole = {
        name: sum(torch.tensor(one) for one in ranks.gather(g.tolist())) / ranks.size for name, g in wanted.items()
    }
    off = sum(float((part - whole[name][start : start + len(part)]).square().sum()) for name, start, part in found)
    size = sum(float(g.square().sum()) for g in whole.values())
    alone = _seen(found) == sum(g.numel() for g in whole.values())  # stage 0: each rank has all of it
    return float(((off if alone else ranks.sum([off])[0]) / size) ** 0.5)


def _seen(found: list[tuple[str, int, torch.Tensor]]) -> int:
    return sum(len(part) for _, _, part in found)


def _taken(task: Any, config: dict[str, Any], batches: list[Batch]) -> list[tuple[str, int, torch.Tensor]]:
    """Yield (name, first value, gradient) of this rank's slices after a step of the engine. Collective."""
    with zero3_init(config):
        objective = build_train_module(task)
    engine = DeepSpeedEngine(
        objective, build_param_groups(objective.model, task.recipe.optim), task.recipe.optim, config, world()
    )
    before = _held(engine)
    engine.step(batches, lr=LR)
    after = _held(engine)
    return [(name, start, (before[name, start] - after[name, start]) / LR) for name, start in before]


def _held(engine: DeepSpeedEngine) -> dict[tuple[str, int], torch.Tensor]:
    """(name, first value) -> the master's values, float64."""
    return {
        (place.name, place.start): part.tensor.detach().view(-1)[place.offset : place.offset + place.numel].double()
        for parts in engine.state_slices()
        for part in parts
        if part.optimizer is not None
        for place in part.ranges
    }


def _summed(task: Any, batches: list[Batch], scale: float) -> dict[str, torch.Tensor]:
    """Name -> the fp32 sum of the gradients that a model in bf16 has for each batch, flattened."""
    objective = build_train_module(task)
    for parameter in objective.parameters():
        parameter.data = parameter.data.bfloat16()
    sums = {name: torch.zeros(p.numel()) for name, p in objective.model.named_parameters()}
    objective.train()
    for batch in batches:
        total, _ = objective(batch)
        (total * scale).backward()
        for name, parameter in objective.model.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.float().view(-1)
                parameter.grad = None
    return {name: total.double() for name, total in sums.items()}
