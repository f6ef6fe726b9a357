"""Worker functions of the optimizer tests: steps on integer gradients, whose sums do not depend on the split."""

from __future__ import annotations

import inspect
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from dstrain.batch import Batch
from dstrain.config import BatchPlan, RunConfig
from dstrain.config.schema import OptimConfig
from dstrain.distributed.world import SingleProcessWorld, World
from dstrain.ds_config import Device, resolve_ds_config
from dstrain.models.params import build_param_groups
from dstrain.preset import Preset, read_preset
from dstrain.tasks import Task
from dstrain.tasks.common.task import Loss
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.engine.module import TrainModule
from dstrain.training.engine.optimizers import make_optimizer
from dstrain.training.engine.torch import TorchEngine
from tests.parity.cases import weights, world
from tests.save_and_load import go_on, keep

WIDTHS = ((12, 7), (33, 16), (5, 16), (9, 20), (20, 20), (3, 16))
"""(rows, columns): ZeRO's partitions cut them anywhere."""
WIDE = (600, 900)
"""A share of it is above a MiB: DeepSpeed puts nothing smaller on a disk."""
RATES = (0.01, 0.02, 0.005)
SAMPLES = 8
"""Of a step: a power of two, so that the mean is exact too."""


class Slopes(torch.nn.Module):
    """Parallel layers, so that no gradient depends on a weight."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.table = torch.nn.Embedding(70_000 if wide else 11, 8)
        widths = (*WIDTHS, WIDE) if wide else WIDTHS
        self.layers = torch.nn.ModuleList(torch.nn.Linear(columns, rows) for rows, columns in widths)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1

    def forward(self, ids: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        """(B,): each sample's (B,) numbers pull at every weight; row 0 of the table is never pulled at."""
        total = (self.table(1 + ids % 10) * signs[:, :8]).sum(1)
        for layer in self.layers:
            rows, columns = layer.out_features, layer.in_features
            total = total + (layer(signs[:, :columns]) * signs[:, -rows:]).sum(1)
        return total


@dataclass(frozen=True, kw_only=True)
class Pull(Task):
    """A task whose loss is linear in every weight."""

    wide: bool = False

    def examples(self, split: str) -> Sequence[int]:
        return range(64)

    def collate(self, examples: Sequence[int]) -> Batch:
        signs = [np.random.default_rng(sample).integers(-1, 2, 1000) for sample in examples]
        tensors = {"ids": torch.tensor(examples), "signs": torch.tensor(np.stack(signs), dtype=torch.float32)}
        return Batch(tensors=tensors, weight=float(len(examples)), samples=tuple(examples), tokens=0)

    def build_model(self) -> torch.nn.Module:
        return Slopes(self.wide)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        dtype = next(model.parameters()).dtype
        return Loss(model(batch.tensors["ids"], batch.tensors["signs"].to(dtype)).float().sum())


def make(
    kind: str, optim: dict[str, Any], precision: str = "fp32", more: dict[str, Any] | None = None, wide: bool = False
) -> Any:
    """Return an engine on new weights; `kind` is `torch` or a preset, to whose JSON `more` is added. Collective.

    In bf16 the weights begin as numbers that bf16 has; the definition goes on from them in fp32, as ZeRO's masters do.
    """
    ranks: World = SingleProcessWorld() if kind == "torch" else world()
    values = {"task": "pull", "optim": {"lr": 0.01, "clip": 0.0, **optim}, "precision": precision}
    recipe = RunConfig.model_validate(values)
    task = Pull(recipe=recipe, wide=wide)
    objective = TrainModule(task, task.build_model())
    if precision == "bf16":
        for parameter in objective.parameters():
            parameter.data = parameter.data.bfloat16().float()
    groups = build_param_groups(objective.model, recipe.optim)
    if kind == "torch":
        return TorchEngine(objective, groups, recipe.optim, ranks.device)
    return DeepSpeedEngine(objective, groups, recipe.optim, ds_config(kind, recipe, ranks.size, more or {}), ranks)


def ds_config(kind: str, recipe: RunConfig, processes: int, more: dict[str, Any]) -> dict[str, Any]:
    preset = read_preset(kind)
    zero = {**preset.block["zero_optimization"], **more.get("zero_optimization", {})}
    if "buffer_size" in zero.get("offload_param", {}):
        zero["offload_param"] = {**zero["offload_param"], "buffer_size": 1_000_000}  # instead of 2 GB of locked memory
    block = {**preset.block, **more, "zero_optimization": zero}
    batch = BatchPlan(SAMPLES, SAMPLES // (2 * processes), 2)
    folder = Path(tempfile.mkdtemp())
    return resolve_ds_config(recipe, Preset(kind, preset.path, block), batch, processes, Device("cpu", True), folder)


def take(engine: Any, numbers: Sequence[int], poison: int | None = None) -> list[float]:
    """Take steps, each on its own samples in two micro-batches; return their norms. Collective."""
    ranks, task, norms = engine.world, engine.train_module.task, []
    for number in numbers:
        samples = np.arange(SAMPLES) + number * SAMPLES
        chunks = np.array_split(samples, ranks.size * 2)[ranks.rank * 2 : ranks.rank * 2 + 2]
        batches = [task.collate(chunk.tolist()) for chunk in chunks]
        if number == poison and ranks.rank == 0:
            batches[0] = batches[0].with_tensors({"signs": batches[0].tensors["signs"] * float("inf")})
        norms.append(engine.step(batches, RATES[number % len(RATES)]).grad_norm)
    return norms


def steps(poison: int | None = None, count: int = 3, **arguments: Any) -> dict[str, Any]:
    """Return the weights before and after some steps. Collective."""
    engine = make(**arguments)
    before = weights(engine.train_module.model)
    norms = take(engine, range(count), poison)
    return {"before": before, "after": weights(engine.train_module.model), "norms": norms}


def unchecked(**arguments: Any) -> dict[str, Any]:
    """Return `steps` of an optimizer that dstrain refuses. Collective."""
    with mock.patch("dstrain.ds_config.check_optimizer"):
        return steps(**arguments)


@contextmanager
def second_device() -> Iterator[None]:
    """Give DeepSpeed's device another name than `cpu`, so that a part of the optimizer stays on it, as on a GPU."""
    accelerator = get_accelerator()
    accelerator._name = "cpu:0"
    try:
        yield
    finally:
        accelerator._name = "cpu"


def partly_offloaded(what: str, **arguments: Any) -> Any:
    """Return `steps` or `resumed` with some subgroups of the optimizer on the second device. Collective."""
    with second_device():
        return {"steps": steps, "resumed": resumed}[what](**arguments)


def resumed(
    kind: str,
    optim: dict[str, Any],
    folder: str,
    precision: str = "fp32",
    wide: bool = False,
    more: dict[str, Any] | None = None,
) -> float:
    """Return the largest difference between five steps and two plus three steps across a checkpoint. Collective."""
    whole = make(kind, optim, precision, more, wide)
    take(whole, range(5))
    first = make(kind, optim, precision, more, wide)
    take(first, range(2))
    kept = keep(first, Path(folder))
    second = make(kind, optim, precision, more, wide)
    go_on(second, kept)
    take(second, range(2, 5))
    wanted, found = weights(whole.train_module.model), weights(second.train_module.model)
    return max(float(abs(found[name] - wanted[name]).max()) for name in wanted)


def moved(kind: str, optim: dict[str, Any], folder: str, load: str | None = None) -> dict[str, Any]:
    """Take two steps and write a checkpoint, or load it and take three more; return the weights. Collective."""
    engine = make(kind, optim, wide=True)
    before = weights(engine.train_module.model)
    if load is not None:
        go_on(engine, Path(load))
        take(engine, range(2, 5))
        return {"before": before, "after": weights(engine.train_module.model)}
    take(engine, range(2))
    return {"checkpoint": str(keep(engine, Path(folder)))}


def muon_steps(rows: int, columns: int, gradients: Sequence[Any], rates: Sequence[float]) -> np.ndarray:
    """Return a matrix of ones after Muon steps along these gradients with decay 0.1, without an engine."""
    layer = torch.nn.Linear(columns, rows, bias=False)
    layer.weight.data.fill_(1.0)
    optim = OptimConfig(name="muon", lr=1.0, weight_decay=0.1)
    groups = build_param_groups(layer, optim)
    optimizer = make_optimizer(groups, optim, None, torch.device("cpu"))
    for gradient, rate in zip(gradients, rates, strict=True):
        layer.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.param_groups[0]["lr"] = rate * groups[0].lr_scale
        optimizer.step()
    return layer.weight.detach().double().numpy()


def muons_functions() -> list[bool]:
    """Return whether each function of DeepSpeed's Muon is uncompiled after the optimizer is built."""
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    muon_steps(2, 2, [], [])
    names = ("muon_update", "zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz")
    found = [getattr(original_muon, name) for name in names] + [muon_optimizer.muon_update]
    return [isinstance(function, types.FunctionType) and function is inspect.unwrap(function) for function in found]
