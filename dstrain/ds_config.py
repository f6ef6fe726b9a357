"""The DeepSpeed configuration of a run: where recipe, preset and machine meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config import BatchPlan, RunConfig
from dstrain.config.schema import OptimConfig, check_dtype
from dstrain.errors import Fault, PresetError, RecipeError
from dstrain.models.quantization import OPTIMIZERS_8BIT, find_zero3_fault
from dstrain.preset import Device, Precision, Preset, RunSettings, complete_preset, resolve_precision


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
