"""A model with an unused part and a part without gradient, and its check after the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import RunConfig
from dstrain.models.params import build_param_groups, zero3_init
from dstrain.tasks import Loss, Task
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.engine.module import TrainModule
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.health.trainability import TrainabilityCheck
from tests.parity.cases import world
from tests.parity.optimizer_cases import ds_config


class Parts(torch.nn.Module):
    """`used` is trained, `idle` is in no sum, `nought` gets zero gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("used", "idle", "nought"):
            setattr(self, name, torch.nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B,)"""
        return self.used(x).sum(1) + 0 * self.nought(x).sum(1)


@dataclass(frozen=True, kw_only=True)
class Sum(Task):
    unused_in: str = ""
    """Where `nought` takes the place of `used`: the "second" micro-batch of a step, a "rank", "later" than step 1."""

    def examples(self, split: str) -> Sequence[int]:
        return range(64)

    def collate(self, examples: Sequence[int]) -> Batch:
        x = torch.tensor([[float(sample + column) for column in range(5)] for sample in examples])
        return Batch(tensors={"x": x}, weight=float(len(examples)), samples=tuple(examples), tokens=0)

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return Parts()

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        (sample,) = batch.samples
        is_left_out = {"": False, "second": sample % 2 == 1, "rank": sample % 4 >= 2, "later": sample >= 8}
        if self.unused_in:
            part: Any = model.nought if is_left_out[self.unused_in] else model.used
            return Loss(total=part(batch.tensors["x"].to(model.used.weight.dtype)).sum())
        return Loss(total=model(batch.tensors["x"].to(model.used.weight.dtype)).sum())


def look(
    kind: str, rates: Sequence[float] = (0.1, 0.1, 0.1), unused_in: str = "", precision: str = "fp32"
) -> tuple[list[Any], dict[str, list[float]]]:
    """Return what is reported after steps with these rates, and the trained weights of stage 0 and torch. Collective.

    `kind`: a preset, or torch.
    """
    recipe = RunConfig.model_validate(
        {"task": "sum", "optim": {"name": "sgd", "lr": 0.1, "clip": 0.0}, "precision": precision}
    )
    task, ranks = Sum(recipe=recipe, unused_in=unused_in), world()
    told: list[Any] = []

    def tell(event: str, **about: Any) -> None:
        told.append((event, about))

    if kind == "torch":
        objective = TrainModule(task, task.build_model())
        engine: Any = TorchEngine(
            objective, build_param_groups(objective.model, recipe.optim), recipe.optim, ranks.device
        )
    else:
        config = ds_config(kind, recipe, ranks.size, {})
        with zero3_init(config):
            objective = TrainModule(task, task.build_model())
        groups = build_param_groups(objective.model, recipe.optim)
        engine = DeepSpeedEngine(objective, groups, recipe.optim, config, ranks)
    learning = TrainabilityCheck(engine, engine.train_module, tell)
    learning.start()
    for number, rate in enumerate(rates):
        own = 4 // ranks.size
        first = number * 8 + ranks.rank * own
        result: StepResult = engine.step([task.collate([first + i]) for i in range(own)], rate)
        learning.check_step(result, rate)
    weights = {name: weight.flatten().tolist() for name, weight in engine.train_module.model.named_parameters()}
    return told, weights
