"""DeepSpeed settings of a run that come from recipe, preset, batch and machine."""

from __future__ import annotations

from dstrain.config import BatchPlan, RunConfig
from dstrain.preset import Device, Preset, RunSettings, resolve_precision


def make_run_settings(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_and_device: tuple[int, Device], nvme_path: str
) -> RunSettings:
    """Return the settings with which `complete_preset` completes a preset. Raises PresetError."""
    world_size, device = world_and_device
    return RunSettings(
        precision=resolve_precision(preset, config.precision, device),
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
