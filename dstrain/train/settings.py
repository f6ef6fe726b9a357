"""What DeepSpeed is told: a preset completed by what the recipe and the machine decide. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.config import BatchPlan, RunConfig
from dstrain.preset import Device, Preset, RunSettings, complete, resolve_precision


def resolved_ds_config(
    config: RunConfig, preset: Preset, batch: BatchPlan, machine: tuple[int, Device], run_dir: Path
) -> dict[str, Any]:
    """The whole DeepSpeed JSON of a run; `machine` is (processes, what each computes on). Raises PresetError."""
    world_size, device = machine
    settings = RunSettings(
        precision=resolve_precision(preset, config.precision, device),
        micro=batch.micro,
        accumulate=batch.accumulate,
        world_size=world_size,
        clip=config.optim.clip,
        nvme_path=str(run_dir / "nvme"),
        device_kind=device.kind,
        foreign_optimizer=config.optim.name != "adamw" or preset.offload_optimizer is None,
    )
    return complete(preset, settings=settings)
