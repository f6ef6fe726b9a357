"""Worker functions of the parity tests: one step of a task on given samples with any engine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.data.loading.micro_batches import MicroBatchLimits, make_cost_function, of_rank, split_by_tokens
from dstrain.distributed.world import SequenceGroup, SingleProcessWorld, World, data_parallel_rank
from dstrain.ds_config import RunSettings, complete_preset
from dstrain.models.params import build_param_groups, gathered, zero3_init
from dstrain.preset import read_preset
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.task import as_dataset, load_split
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.engine.module import TrainModule
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.evaluate import iter_eval_results
from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select
from tests.vision_recipes import named_recipe
from tests.workers import worker_world


def world() -> World:
    return worker_world()


def tiny_task(name: str, changes: dict[str, Any] | None = None) -> Task:
    """Return a task with its tiny recipe; `rm, with images`: a vision-language model. `changes` overrides sections."""
    _, recipe = named_recipe(name, Path(tempfile.mkdtemp()))
    for key, value in (changes or {}).items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) else value
    return make_task(RunConfig.model_validate(recipe))


def ds_config(preset: str, settings: dict[str, Any]) -> dict[str, Any]:
    values = {"precision": "fp32", "micro": 1, "accumulate": 1, "world_size": 1, "clip": 0.0, "device_kind": "cpu",
              "uses_custom_optimizer": True, "nvme_path": tempfile.gettempdir()} | settings  # fmt: skip
    return complete_preset(read_preset(preset), settings=RunSettings(**values))


@dataclass(frozen=True)
class Made:
    """An engine with its task's samples, in the workers' world or this process alone."""

    task: Task
    examples: Sequence[Any]
    engine: Any

    @property
    def model(self) -> torch.nn.Module:
        return self.engine.train_module.model

    def batches(self, samples: list[int], accumulate: int) -> list[Batch]:
        """Return this rank's share of the samples, split as in training."""
        rank, size = data_parallel_rank(self.engine.world)
        chunks = np.array_split(np.array(samples), size * accumulate)
        return [
            make_batch(
                self.examples, self.task.collate, chunk.tolist(), samples[0], sequence=self.engine.world.sequence
            )
            for chunk in chunks[rank * accumulate : (rank + 1) * accumulate]
        ]

    def batches_of_tokens(self, samples: list[int], limit: int) -> list[Batch]:
        """Return this rank's share of the samples in micro-batches of so many tokens, split as in training."""
        ranks, costs = self.engine.world, make_cost_function(as_dataset(self.examples), self.task.packing)
        assert costs is not None
        chunks = split_by_tokens(costs(np.array(samples)), MicroBatchLimits(tokens=limit), ranks.size)
        mine = [[samples[place] for place in chunk] for chunk in of_rank(chunks, ranks.size, ranks.rank)]
        return [make_batch(self.examples, self.task.collate, chunk, samples[0]) for chunk in mine]


def made(task: str, kind: str, accumulate: int, changes: dict[str, Any] | None = None, precision: str = "fp32") -> Made:
    """`kind` is `torch` for the definition, else a preset's name. `moved: true` in the changes moves what learns."""
    changes = dict(changes or {})
    moved = changes.pop("moved", False)
    found = tiny_task(task, changes)
    optim = found.recipe.optim
    ranks: World = SingleProcessWorld() if kind == "torch" else world()
    if kind != "torch":
        share_sequences(ranks, found.recipe.parallel.sequence)
    settings = {"accumulate": accumulate, "world_size": ranks.size, "clip": optim.clip, "precision": precision}
    config = ds_config("zero0" if kind == "torch" else kind, settings)
    job = OutputsJob(task=found, ds_config=config, micro_batch_size=3, world=ranks)
    examples = add_outputs_and_select(job, {"train": load_split(found, "train")})["train"]
    assert examples is not None
    with zero3_init(config):
        objective = build_train_module(found)
    if moved:
        move(objective.model)
    groups = build_param_groups(objective.model, optim)
    if kind == "torch":
        return Made(found, examples, TorchEngine(objective, groups, optim, torch.device("cpu")))
    return Made(found, examples, DeepSpeedEngine(objective, groups, optim, config, ranks))


_groups: dict[int, SequenceGroup | None] = {1: None}


def share_sequences(ranks: Any, size: int) -> None:
    """Let ranks share their micro-batches; the process groups are kept for the next test. Collective."""
    if size not in _groups:
        ranks.share_sequences(size)
        _groups[size] = ranks.sequence
    ranks.sequence = _groups[size]


def move(model: torch.nn.Module) -> None:
    """Add noise to the trainable parameters, so that the policy differs from its reference. Collective."""
    noise = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            with gathered([parameter], modify=True), torch.no_grad():
                parameter.add_(
                    torch.randn(parameter.shape, generator=noise, dtype=torch.float64).to(parameter), alpha=0.02
                )


def one_step(
    task: str,
    kind: str,
    samples: list[int],
    accumulate: int,
    changes: dict[str, Any] | None = None,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Return the sums and the gradient of one step over the samples, measured by SGD with a large rate."""
    run = made(task, kind, accumulate, changes, precision)
    ranks, lr = run.engine.world, run.task.recipe.optim.lr
    before = weights(run.model)
    result = run.engine.step(run.batches(samples, accumulate), lr=lr)
    after = weights(run.model)
    sums = ranks.sum(
        [float(result.loss), result.weight, *(float(v) for _, pair in sorted(result.metrics.items()) for v in pair)]
    )
    return {
        "sums": sums,
        "norm": result.grad_norm,
        "before": before,
        "gradient": {name: (before[name] - after[name]) / lr for name in before},
    }


def steps_of_tokens(
    task: str, kind: str, limits: Sequence[int], changes: dict[str, Any] | None = None, precision: str = "fp32"
) -> dict[str, Any]:
    """Return passes, sums and norms of a step for each limit of tokens, and how far all of them moved the weights."""
    run = made(task, kind, 2, changes, precision)
    before, told = weights(run.model), {"passes": [], "sums": [], "norms": []}  # type: ignore[var-annotated]
    for step, limit in enumerate(limits):
        batches = run.batches_of_tokens(list(range(9 * step, 9 * step + 9)), limit)
        result = run.engine.step(batches, lr=run.task.recipe.optim.lr)
        told["passes"].append(len(batches))
        told["sums"].append(run.engine.world.sum([float(result.loss), result.weight]))
        told["norms"].append(result.grad_norm)
    after = weights(run.model)
    return {**told, "gradient": {name: before[name] - after[name] for name in before}}


def several_steps(task: str, kind: str, changes: dict[str, Any] | None = None) -> list[float]:
    """Return the losses of four steps, each after an evaluation on held-out samples."""
    run = made(task, kind, 2, changes)
    losses = []
    for step in range(4):
        looks = list(iter_eval_results(run.engine, run.task, lambda: run.batches(list(range(40, 46)), 1)))
        result = run.engine.step(run.batches(list(range(8 * step, 8 * step + 7)), 2), lr=run.task.recipe.optim.lr)
        losses += run.engine.world.sum([float(one.loss) for one in looks] + [float(result.loss)])
    return losses


def weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return name -> full parameter, float64. Collective."""
    with gathered(model.parameters()):
        return {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}


def rotary_frequencies(kind: str) -> list[str]:
    """Their type in a bf16 engine, and whether they are what a plain model has."""
    made = tiny_task("rm")
    config = ds_config(kind, {"world_size": world().size, "precision": "bf16"})
    with zero3_init(config):
        model = made.build_model()
    DeepSpeedEngine(
        TrainModule(made, model), build_param_groups(model, made.recipe.optim), made.recipe.optim, config, world()
    )
    plain = dict(made.build_model().named_buffers())
    return [
        f"{value.dtype} {torch.equal(value, plain[name])}"
        for name, value in model.named_buffers()
        if "inv_freq" in name
    ]


def reward_models_held(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Take a step of dpo with a reward model in memory; return how that is held. Collective."""
    run = made("dpo", kind, 1, changes)
    run.engine.step(run.batches([1, 2, 3, 4], 1), lr=1e-3)
    (held,) = run.engine.train_module.reward_models
    names = run.engine.state_metadata()["shapes"]
    optimized = {id(one) for group in run.engine.engine.optimizer.param_groups for one in group["params"]}
    return {
        "sharded": all(hasattr(one, "ds_id") for one in held.parameters()),
        "trained": sum(one.requires_grad or id(one) in optimized for one in held.parameters()),
        "in state": sorted(name for name in names if "score" in name or "reward" in name),
        "in evaluation mode": not held.training,
    }
