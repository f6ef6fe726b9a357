"""DeepSpeed settings of a run that come from recipe, preset, batch and machine; recipes that a preset cannot train."""

from __future__ import annotations

from dstrain.config import BatchPlan, RunConfig
from dstrain.config.rules import check_dtype
from dstrain.config.schema import OptimConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.quantization.layers import zero3_fault
from dstrain.models.quantization.library import OPTIMIZERS_8BIT
from dstrain.preset import Device, Precision, Preset, RunSettings, resolve_precision


def make_run_settings(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_and_device: tuple[int, Device], nvme_path: str
) -> RunSettings:
    """Return the settings with which `complete_preset` completes a preset.

    Raises PresetError, or RecipeError if the recipe contradicts the preset or its precision.
    """
    world_size, device = world_and_device
    precision = resolve_precision(preset, config.precision, device)
    check_recipe_fits(config, preset, precision)
    return RunSettings(
        precision=precision,
        micro=batch.largest_micro(world_size),
        accumulate=batch.ds_accumulate(world_size, can_shrink=config.batch.on_oom == "shrink"),
        world_size=world_size,
        total=batch.total,
        clip=config.optim.clip,
        nvme_path=nvme_path,
        device_kind=device.kind,
        # Only adamw with offload is DeepSpeed's own CPU Adam (see make_optimizer).
        uses_custom_optimizer=config.optim.name != "adamw" or preset.offload_optimizer is None,
        uses_muon=config.optim.name == "muon",
    )


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
        raise RecipeError(zero3_fault(preset.name))
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
