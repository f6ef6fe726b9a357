"""The DeepSpeed configuration of a run: where recipe, preset and machine meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from dstrain.config import BatchPlan, RunConfig
from dstrain.config.schema import OptimConfig, check_dtype
from dstrain.errors import Fault, PresetError, RecipeError, lookup
from dstrain.models.quantization import OPTIMIZERS_8BIT, find_zero3_fault
from dstrain.preset import Preset
from dstrain.preset.check import ZERO_BLOCK
from dstrain.preset.keys import cast_integers

Precision = Literal["fp32", "bf16", "fp16"]

STEPS_PER_PRINT = 2**31 - 1
"""Steps between DeepSpeed's own log lines: dstrain writes its own."""

_DTYPE_NAMES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32", "float32", "float")}


@dataclass(frozen=True)
class Device:
    """Device of a process."""

    kind: Literal["cuda", "cpu"]
    bf16: bool
    """True where it supports bfloat16."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """DeepSpeed settings that come from the recipe and the launch."""

    precision: Precision
    micro: int
    """Samples of the largest forward pass."""
    accumulate: int
    """Forward passes per step and process."""
    world_size: int
    """Processes."""
    total: int | None = None
    """Samples per step; None: micro x accumulate x processes."""
    clip: float
    """Maximum gradient norm; 0: no clipping."""
    nvme_path: str | None = None
    """Folder for NVMe offload, used if the preset names none."""
    device_kind: Literal["cuda", "cpu"] = "cuda"
    uses_custom_optimizer: bool = False
    """True for any optimizer but DeepSpeed's CPU Adam."""
    uses_muon: bool = False
    """True for Muon, for which DeepSpeed gathers complete gradients."""


def resolve_ds_config(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int, device: Device, run_dir: Path
) -> dict[str, Any]:
    """Return the complete DeepSpeed JSON of a run. Imports no torch.

    Raises PresetError, or RecipeError if the recipe contradicts the preset or its precision.
    """
    precision = resolve_precision(preset, config.precision, device)
    check_recipe_fits(config, preset, precision)
    settings = RunSettings(
        precision=precision,
        micro=batch.largest_micro(world_size),
        accumulate=batch.ds_accumulate,
        world_size=world_size,
        total=batch.total,
        clip=config.optim.clip,
        nvme_path=str(run_dir / "nvme"),
        device_kind=device.kind,
        # Only adamw with offload is DeepSpeed's own CPU Adam (see make_optimizer).
        uses_custom_optimizer=config.optim.name != "adamw" or preset.offload_optimizer is None,
        uses_muon=config.optim.name == "muon",
    )
    return complete_preset(preset, settings=settings)


def check_recipe_fits(config: RunConfig, preset: Preset, precision: Precision) -> None:
    """Raise RecipeError for a recipe that cannot be trained with the preset in this precision."""
    if faults := [Fault(".".join(key), *rest) for key, *rest in check_dtype(config, precision)]:
        raise RecipeError(faults)  # `precision: auto` is resolved only here
    if (
        preset.block.get("activation_checkpointing", {}).get("cpu_checkpointing")
        and not config.model.gradient_checkpointing
    ):
        problem = "is false, but the preset's activation_checkpointing.cpu_checkpointing needs recomputed layers"
        raise RecipeError(Fault("model.gradient_checkpointing", problem, "write true, or remove cpu_checkpointing"))
    if config.model.quantize is not None and preset.stage == 3:
        zero = preset.block.get("zero_optimization", {})
        if fault := find_zero3_fault(config.model.quantize, preset.name, zero):
            raise RecipeError(fault)
    check_optimizer(config.optim, preset, precision)


def check_optimizer(optim: OptimConfig, preset: Preset, precision: Precision) -> None:
    """Raise RecipeError for an optimizer that would compute something else at the preset's ZeRO stage.

    DeepSpeed itself accepts all of these silently.
    """
    faults, stage = [], f"ZeRO stage {preset.stage}"
    if optim.name == "adafactor" and preset.stage:
        problem = f"adafactor needs whole matrices, but {stage} partitions them into flat ranges"
        faults.append(Fault("optim.name", problem, "use ds_config: zero0, or optim.name: adamw"))
    if optim.name in OPTIMIZERS_8BIT and preset.offload_optimizer is not None:
        problem = f"{optim.name} runs on the GPU, but {preset.name} keeps the optimizer's state on the host"
        fix = "write adamw, DeepSpeed's CPUAdam there; or a preset without offload, such as zero2 or zero2_bf16"
        faults.append(Fault("optim.name", problem, fix))
    if optim.name == "muon" and precision == "fp16":
        problem = "muon keeps a momentum of gradients, but the loss scale of fp16 changes between steps"
        faults.append(Fault("optim.name", problem, "use precision: bf16, or optim.name: adamw"))
    if optim.name == "muon" and preset.stage and optim.clip:
        problem = f"is {optim.clip:g}, but at {stage} DeepSpeed clips Muon's updates instead of the gradient"
        fix = "remove it (Muon's updates all have the same norm), or use ds_config: zero0"
        faults.append(Fault("optim.clip", problem, fix))
    if faults:
        raise RecipeError(faults)


def check_offload_folders(ds_config: Mapping[str, Any], run_dir: Path) -> None:
    """Raise PresetError if an NVMe offload folder of the preset is missing or not writable.

    DeepSpeed would create it on whatever disk is there. The default folder in the run folder is created.
    """
    zero, faults = ds_config["zero_optimization"], []
    for name in ("offload_optimizer", "offload_param"):
        path = zero.get(name, {}).get("nvme_path") if zero.get(name, {}).get("device") == "nvme" else None
        if path is None or Path(path) == run_dir / "nvme":
            continue
        if not Path(path).is_dir():
            problem, fix = "this folder does not exist on this machine", "create it on a local disk of every host"
        elif not os.access(path, os.W_OK | os.X_OK):
            problem, fix = "the folder is not writable", "change its permissions, or name another"
        else:
            continue
        faults.append(Fault(f"zero_optimization.{name}.nvme_path {path}", problem, fix))
    if faults:
        raise PresetError(faults)


def ds_config_warnings(ds_config: Mapping[str, Any]) -> list[str]:
    """Return warnings about this JSON for the start of a run."""
    several, stage = ds_config["gradient_accumulation_steps"] > 1, ds_config["zero_optimization"]["stage"]
    if not (several and ds_config["bf16"]["enabled"] and stage == 0):
        return []
    return [
        "at stage 0 DeepSpeed sums the gradients of several micro-batches in bf16, which loses precision; zero1 sums in fp32"
    ]


def batch_warnings(batch: BatchPlan, world_size: int) -> list[str]:
    """Return warnings about a batch that `world_size` processes share."""
    largest = batch.largest_micro(world_size)
    if batch.accumulate is None or batch.accumulate > 1 or largest >= batch.micro:
        return []
    return [
        f"batch.micro is {batch.micro}, but a step of {batch.total} samples on {world_size} processes takes at most {largest} "
        "in one forward pass; raise batch.total, or lower batch.micro"
    ]


def resolve_precision(preset: Preset, requested: str, device: Device) -> Precision:
    """Return the precision of the run. `requested`: the recipe's auto, bf16, fp16 or fp32.

    Raises PresetError where recipe and preset disagree, or the device does not support bf16.
    """
    enabled = preset.precision
    if requested != "auto" and enabled not in (None, requested):
        problem = f"the recipe sets precision: {requested}, but this file enables {enabled}"
        if enabled == "fp32":
            problem = f"the recipe sets precision: {requested}, but this file disables fp16 and bf16"
        fix = f"write precision: auto in the recipe, or remove `fp16` and `bf16` from {preset.path.name}"
        raise PresetError(Fault(f"{preset.path.name} precision", problem, fix))
    chosen = enabled if requested == "auto" else requested
    if chosen == "bf16" and not device.bf16:
        problem = f"bf16 is requested, but this {'GPU' if device.kind == 'cuda' else 'CPU'} does not support it"
        raise PresetError(Fault(f"{preset.path.name} precision", problem, "write precision: fp16 or fp32"))
    if chosen is None:
        chosen = "fp32" if device.kind == "cpu" else "bf16" if device.bf16 else "fp16"
    return cast("Precision", chosen)


def complete_preset(preset: Preset, *, settings: RunSettings) -> dict[str, Any]:
    """Return the config for deepspeed.initialize. Does not change the preset.

    Raises PresetError where the preset does not fit precision, device or optimizer.
    """
    faults = _check_compatibility(preset, settings)
    if faults:
        raise PresetError(faults)
    block = cast_integers(preset.block)
    block["train_micro_batch_size_per_gpu"] = settings.micro
    block["gradient_accumulation_steps"] = settings.accumulate
    product = settings.micro * settings.accumulate * settings.world_size
    if settings.total in (None, product):  # DeepSpeed accepts only the product; without the key it counts with it too
        block["train_batch_size"] = product
    block["gradient_clipping"] = float(settings.clip)  # DeepSpeed's default is 1.0
    for name in ("fp16", "bf16"):
        block[name] = {**block.get(name, {}), "enabled": settings.precision == name}
    # Without it DeepSpeed refuses optimizers that it did not make, such as Lion here.
    block["zero_allow_untested_optimizer"] = True
    # Or offload would accept CPUAdam and CPULion only.
    block["zero_force_ds_cpu_optimizer"] = False
    block.setdefault(ZERO_BLOCK, {"stage": 0})
    if _accumulates_in_fp32(preset, settings):
        block["data_types"] = {**block.get("data_types", {}), "grad_accum_dtype": "fp32"}
        if preset.stage == 1 and block.get("communication_data_type") is None:
            # At stage 1 DeepSpeed casts the finished sum to the communication dtype, also with one process
            # (engine.py, allreduce_bucket; stage_1_and_2.py, allreduce_bucket).
            block["communication_data_type"] = "fp32"
    if settings.uses_muon and preset.stage == 3:
        # true is DeepSpeed's default, and an error with Muon
        block[ZERO_BLOCK]["reduce_scatter"] = False
    # DeepSpeed's timer makes the host wait for the device twice in each micro-batch, and nothing reads it.
    block["timers"] = {**block.get("timers", {}), "throughput": {"enabled": False}}
    if settings.world_size == 1 and preset.stage in (1, 2):
        # There is no communication to overlap, only a second buffer and a wait for its stream.
        block[ZERO_BLOCK]["overlap_comm"] = False
    block.setdefault("steps_per_print", STEPS_PER_PRINT)
    block.setdefault("wall_clock_breakdown", False)
    for name in ("offload_optimizer", "offload_param"):
        if lookup(block, (ZERO_BLOCK, name, "device")) == "nvme" and not block[ZERO_BLOCK][name].get("nvme_path"):
            block[ZERO_BLOCK][name]["nvme_path"] = settings.nvme_path
    return block


def _accumulates_in_fp32(preset: Preset, settings: RunSettings) -> bool:
    """Return True where the gradients of bf16 micro-batches are summed in fp32.

    In bf16 a sum of 64 is off by 1 % (docs/memory.md). Not at stage 0, where DeepSpeed cannot; not where the preset
    keeps gradients in bf16 on purpose, or sets a dtype; not if it changes Muon's update (`_is_muon_dtype_sensitive`).
    """
    if settings.precision != "bf16" or settings.accumulate == 1 or preset.stage == 0:
        return False
    in_bf16 = lookup(preset.block, ("bf16", "bf16_master_weights_and_grads")) is True
    has_dtype = lookup(preset.block, ("data_types", "grad_accum_dtype")) is not None
    return not (has_dtype or in_bf16 or (settings.uses_muon and _is_muon_dtype_sensitive(preset)))


def _check_compatibility(preset: Preset, settings: RunSettings) -> list[Fault]:
    """Return the faults of this preset with this precision, device and optimizer."""
    file, conflicts = preset.path.name, []
    precision, accumulation = settings.precision, lookup(preset.block, ("data_types", "grad_accum_dtype"))
    if precision == "fp16" and settings.device_kind == "cpu":
        conflicts.append(("precision fp16", "fp16 needs a GPU", "write precision: bf16 or fp32 in the recipe"))
    if precision == "fp16" and preset.stage == 0:
        problem = "at stage 0 DeepSpeed does not scale an fp16 loss but unscales its gradients, which loses them"
        conflicts.append(("precision fp16", problem, "use the preset zero1, or write precision: bf16 or fp32"))
    conflicts += _find_zeropp_conflicts(preset, settings)
    if (
        preset.stage == 0
        and accumulation is not None
        and accumulation.removeprefix("torch.") not in _DTYPE_NAMES[precision]
    ):
        problem = f"stage 0 cannot sum gradients in {accumulation} while training in {precision}"
        conflicts.append(("data_types.grad_accum_dtype", problem, "remove it, or use the preset zero1"))
    for name in ("offload_optimizer", "offload_param"):
        device, path = (
            lookup(preset.block, (ZERO_BLOCK, name, "device")),
            lookup(preset.block, (ZERO_BLOCK, name, "nvme_path")),
        )
        if device == "nvme" and not (path or settings.nvme_path):
            problem = "offloading to nvme needs a folder on a fast local disk"
            conflicts.append((f"{ZERO_BLOCK}.{name}.nvme_path", problem, "write its path here"))
    if settings.uses_custom_optimizer:
        conflicts += _find_cpu_adam_conflicts(preset)
    if settings.uses_muon:
        conflicts += _find_muon_conflicts(preset, precision)
    return [Fault(f"{file} {where}", problem, fix) for where, problem, fix in conflicts]


def _find_zeropp_conflicts(preset: Preset, settings: RunSettings) -> list[tuple[str, str, str]]:
    """Return (key, problem, fix) of keys of ZeRO++ that do not fit the device or the number of processes."""
    conflicts, size = [], lookup(preset.block, (ZERO_BLOCK, "zero_hpz_partition_size"), 1)
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if settings.device_kind == "cpu" and lookup(preset.block, (ZERO_BLOCK, key)) is True:
            problem = "DeepSpeed's quantized collectives need a GPU"
            conflicts.append((f"{ZERO_BLOCK}.{key}", problem, "use the preset zero3_hpz, or zero3, on a CPU"))
    if settings.world_size > size and (size == 0 or settings.world_size % size):
        problem = f"is {size}, which does not divide the {settings.world_size} processes"
        fix = "write the number of GPUs of one host, in a copy of the preset"
        conflicts.append((f"{ZERO_BLOCK}.zero_hpz_partition_size", problem, fix))
    return conflicts


def _find_cpu_adam_conflicts(preset: Preset) -> list[tuple[str, str, str]]:
    """Return (key, problem, fix) of keys that DeepSpeed supports only with its own CPU Adam."""
    offload = f"{ZERO_BLOCK}.offload_optimizer"
    keys = {
        "fp16.fp16_master_weights_and_grads": lookup(preset.block, ("fp16", "fp16_master_weights_and_grads")) is True,
        "bf16.bf16_master_weights_and_grads": preset.offload_optimizer is not None
        and lookup(preset.block, ("bf16", "bf16_master_weights_and_grads")) is True,
        f"{offload}.ratio": lookup(preset.block, (*offload.split("."), "ratio"), 1.0) < 1.0,
        f"{offload}.super_offload": lookup(preset.block, (*offload.split("."), "super_offload")) is True,
    }
    problem = "DeepSpeed supports this only with its own CPU Adam"
    return [(key, problem, "remove it, or write optim.name: adamw in the recipe") for key, used in keys.items() if used]


def _find_muon_conflicts(preset: Preset, precision: Precision) -> list[tuple[str, str, str]]:
    """Return (key, problem, fix) of keys with which DeepSpeed's Muon fails, or silently computes another update."""
    fix, conflicts = "remove it, or write optim.name: adamw in the recipe", []
    for key in ("reduce_scatter", "zero_quantized_gradients"):
        if preset.stage == 3 and lookup(preset.block, (ZERO_BLOCK, key)) is True:
            problem = "DeepSpeed's Muon needs complete gradients at stage 3 and raises an error with this"
            conflicts.append((f"{ZERO_BLOCK}.{key}", problem, fix))
    accumulation = (lookup(preset.block, ("data_types", "grad_accum_dtype")) or precision).removeprefix("torch.")
    if _is_muon_dtype_sensitive(preset) and accumulation not in _DTYPE_NAMES[precision]:
        problem = (
            f"with gradients summed in {accumulation}, DeepSpeed's Muon computes a wrong update at stage {preset.stage}"
        )
        conflicts.append(("data_types.grad_accum_dtype", problem, fix))
    return conflicts


def _is_muon_dtype_sensitive(preset: Preset) -> bool:
    """Return True where DeepSpeed's Muon computes another update if gradients are summed in another dtype."""
    return preset.stage == 2 or (preset.stage == 1 and preset.offload_optimizer is not None)
