"""Construction of the model to train: weights, adapters, frozen parameters, dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from dstrain.config import RunConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.adapters import add_adapters, add_reference_adapter, continue_adapter
from dstrain.models.attention.packed import compiles_attention
from dstrain.models.folder import read_adapter
from dstrain.models.fused_kernels import find_fused_kernels
from dstrain.models.gradient_checkpointing import require_input_grads
from dstrain.models.init_weights import load_init
from dstrain.models.params import freeze, full_numel, unwrap_peft
from dstrain.models.quantization import quantize_model
from dstrain.process_setup import log_stdout
from dstrain.report.run_log import RunLog
from dstrain.resources import TRITON_FIX, is_triton_ready, list_missing_for_triton
from dstrain.tasks import Task
from dstrain.tasks.common.forward import disable_dropout_in_model
from dstrain.tasks.common.judge import make_judge
from dstrain.training.engine.module import FrozenModule, TrainModule


def build_model(task: Task, run_log: RunLog | None = None) -> torch.nn.Module:
    """Return the model of a new run; log its fused kernels, which weights `model.init` matched, and what was quantized.

    Collective under ZeRO-3.
    """
    model = task.build_model()
    wanted = task.recipe.model
    kernels = find_fused_kernels(model)
    if run_log is not None and kernels is not None:
        run_log.log_event("kernels", **kernels.as_event())
        log_stdout(str(kernels))
    if wanted.init is not None:
        report = load_init(model, wanted.init)
        if run_log is not None:
            run_log.log_event("init", **report.as_event())
            log_stdout(str(report))  # stdout of each rank is its log file; rank 0's is on the terminal too
    if wanted.quantize is not None:
        # After `init`, whose values replace those of the layers; before the adapters, whose class follows the layer's.
        summary = quantize_model(model, wanted.quantize, task.export.modules_to_save)
        if run_log is not None:
            run_log.log_event("quantized", **asdict(summary))
            log_stdout(str(summary))
    return _add_adapters_and_freeze(task, model)


def build_train_module(task: Task, run_log: RunLog | None = None) -> TrainModule:
    """Return the task with its model, and the frozen models that are in memory. Collective under ZeRO-3."""
    return add_frozen_models(task, build_model(task, run_log))


def add_frozen_models(task: Task, model: torch.nn.Module) -> TrainModule:
    """Return the task and its model with reference, reward models and judge in memory. Collective under ZeRO-3."""
    wanted = task.recipe.model
    if task.loss_inputs.reference.kind == "adapter" and wanted.lora is not None and not wanted.lora.create_new_adapter:
        adapter = read_adapter(wanted.path)
        assert adapter is not None, "checked with the recipe"
        add_reference_adapter(model, adapter)
    judge = make_judge(task)
    return TrainModule(
        task, model,
        reference=build_reference(task),
        reward_models=[scorer.build() for scorer in task.loss_inputs.scorers if not scorer.is_cached],
        judge=None if judge is None else FrozenModule(judge.frozen_model, judge.frozen_model.build()),
    )  # fmt: skip


def build_reference(task: Task) -> torch.nn.Module | None:
    """Return the reference where it is a model of its own in memory. Collective under ZeRO-3."""
    reference = task.loss_inputs.reference
    return reference.build() if reference.kind == "model" else None


def build_model_without_init(task: Task) -> torch.nn.Module:
    """Return the model without the weights of `model.init`: a checkpoint will replace them. Collective under ZeRO-3."""
    return _add_adapters_and_freeze(task, task.build_model())


def _add_adapters_and_freeze(task: Task, model: torch.nn.Module) -> torch.nn.Module:
    wanted = task.recipe.model
    if wanted.lora is not None:
        heads, seed, adapter = task.export.modules_to_save, task.recipe.seed, read_adapter(wanted.path)
        if adapter is not None and not wanted.lora.create_new_adapter:
            model = continue_adapter(model, adapter, heads, wanted.lora.dropout, seed)
        else:
            model = add_adapters(model, wanted.lora, heads, seed, wanted.revision)
        if task.disables_dropout:
            disable_dropout_in_model(
                unwrap_peft(model)
            )  # also of the adapters; their saved config keeps its lora_dropout
    # After the adapters, so that patterns can name them.
    freeze(model, wanted.freeze)
    if wanted.gradient_checkpointing:
        require_input_grads(unwrap_peft(model))
    return model


def batch_norm_warnings(model: torch.nn.Module) -> list[str]:
    """Return a warning if batch normalization makes a step depend on how its samples are split."""
    parts = [name for name, part in model.named_modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    if not parts:
        return []
    return [
        f"the model has batch normalization ({parts[0]}{' and more' if len(parts) > 1 else ''}), which takes means over each "
        "micro-batch of each process: losses depend on batch.micro and on the number of processes"
    ]


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (parameters, trainable parameters), counted over all shards."""
    sizes = [(full_numel(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trainable in sizes if is_trainable)


def resolve_model_dtype(config: RunConfig, ds_config: Mapping[str, Any]) -> RunConfig:
    """Return the recipe with the dtype in which weights are loaded: `model.dtype`, or the run's precision.

    DeepSpeed casts weights to 16 bits before it copies them to fp32 masters, so loading them in 32 bits
    would give the same masters. In 16 bits the files stay memory-mapped, and processes of a host share them.
    """
    return config if config.model.dtype is not None else with_training_dtype(config, ds_config)


def check_attention_compiler(
    task: Task, dtype_name: str | None, capability: tuple[int, int], environment: Mapping[str, str]
) -> None:
    """Raise RecipeError where packed batches need kernels that Triton cannot compile on this machine.

    `dtype_name`: dtype of the forward pass, as in `model.dtype`; None: float32. `capability`: compute capability of
    the GPU.
    """
    missing, source = list_missing_for_triton(environment), task.model_source
    if not missing or source is None or not task.loss_inputs.packing().is_packed:
        return
    dtype = getattr(torch, dtype_name or "float32")
    config, wanted = source.config, task.recipe.model
    if not compiles_attention(config, wanted.attn_implementation, dtype, capability) or is_triton_ready():
        return
    version = ".".join(map(str, capability))
    problem = (
        f"attention of packed batches in {str(dtype).removeprefix('torch.')} on a GPU of compute capability {version}"
    )
    raise RecipeError(
        Fault("batch.packing", f"{problem} is compiled by Triton, which lacks {' and '.join(missing)}", TRITON_FIX)
    )


def get_training_dtype(ds_config: Mapping[str, Any]) -> str | None:
    """Return the dtype that DeepSpeed casts weights to, as in `model.dtype`; None: float32."""
    enabled = [name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")]
    return {"bf16": "bfloat16", "fp16": "float16"}[enabled[0]] if enabled else None


def with_training_dtype(config: RunConfig, ds_config: Mapping[str, Any]) -> RunConfig:
    """Return the recipe with weights loaded in the precision that DeepSpeed would cast them to."""
    dtype = get_training_dtype(ds_config)
    if dtype is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
