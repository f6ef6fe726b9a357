"""The DeepSpeed configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config import BatchPlan, RunConfig
from dstrain.errors import Fault, PresetError
from dstrain.planner.workload import make_run_settings
from dstrain.preset import Device, Preset, complete_preset


def resolve_ds_config(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int, device: Device, run_dir: Path
) -> dict[str, Any]:
    """Return the complete DeepSpeed JSON of a run. Imports no torch.

    Raises PresetError, or RecipeError if the recipe contradicts the preset or its precision.
    """
    settings = make_run_settings(config, preset, batch, world_size, device, str(run_dir / "nvme"))
    return complete_preset(preset, settings=settings)


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
