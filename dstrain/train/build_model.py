"""A task's model as it learns: loaded or drawn, its starting weights put in, adapters put on, parts frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dstrain.config import RunConfig
from dstrain.models.adapters.lora import add_adapters
from dstrain.models.params.freeze import freeze
from dstrain.models.params.zero3 import full_numel
from dstrain.models.weights.init_weights import load_init
from dstrain.report.run_log import RunLog
from dstrain.tasks import Task
from dstrain.tasks.common.losses import disable_dropout_in_model, unwrap_peft
from dstrain.train.engine.module import TrainModule


def build_model(task: Task, run_log: RunLog | None = None) -> torch.nn.Module:
    """The model of a new run; `journal` is told what came of `model.init`. Collective under ZeRO-3."""
    model = task.build_model()
    wanted = task.recipe.model
    if wanted.init is not None:
        report = load_init(model, wanted.init)
        if run_log is not None:
            run_log.log_event("init", **report.as_event())
            print(report, flush=True)  # into each rank's log; the terminal is rank 0's
    return _add_adapters_and_freeze(task, model)


def build_train_module(task: Task, run_log: RunLog | None = None) -> TrainModule:
    """The task with its model, and with its reference where that is held in memory. Collective under ZeRO-3."""
    model = build_model(task, run_log)
    return TrainModule(task, model, task.build_reference() if task.reference_kind == "model" else None)


def build_model_without_init(task: Task) -> torch.nn.Module:
    """The same parts, for weights that a checkpoint brings. Collective under ZeRO-3."""
    return _add_adapters_and_freeze(task, task.build_model())


def _add_adapters_and_freeze(task: Task, model: torch.nn.Module) -> torch.nn.Module:
    wanted = task.recipe.model
    if wanted.lora is not None:
        model = add_adapters(model, wanted.lora, task.heads, task.recipe.seed)
        if getattr(task, "disable_dropout", False):
            disable_dropout_in_model(unwrap_peft(model))  # the adapters' too; their config keeps what it says
    freeze(model, wanted.freeze)
    return model


def batch_norm_warnings(model: torch.nn.Module) -> list[str]:
    """A sentence where a step is not the same however its samples are split, as far as the model's parts tell."""
    parts = [name for name, part in model.named_modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    if not parts:
        return []
    return [
        f"the model has batch normalization ({parts[0]}{' and more' if len(parts) > 1 else ''}), whose means are those of each "
        "micro-batch of each process: losses depend on batch.micro and on the number of processes"
    ]


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """(parameters, parameters that learn)."""
    sizes = [(full_numel(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, learns in sizes if learns)


def resolve_model_dtype(config: RunConfig, ds_config: Mapping[str, Any]) -> RunConfig:
    """The recipe that a run's task is made for: weights are loaded in the run's precision, or in `model.dtype`.

    DeepSpeed casts weights to its 16 bits before it makes fp32 masters of them, so weights that are loaded in 32 bits
    give the same masters. In 16 bits the files of a model stay mapped into memory, which the processes of a host share.
    """
    return config if config.model.dtype is not None else with_training_dtype(config, ds_config)


def with_training_dtype(config: RunConfig, ds_config: Mapping[str, Any]) -> RunConfig:
    """The recipe with the weights loaded in the precision that DeepSpeed would cast them to."""
    enabled = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    if not enabled:
        return config
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[enabled[0]]
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
