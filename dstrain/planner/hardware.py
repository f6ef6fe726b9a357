"""The machine that a starter recipe is written for, and the largest packaged model that it trains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dstrain.config import RunConfig
from dstrain.errors import DstrainError
from dstrain.launch.threads import count_available_cores
from dstrain.launch.topology import gpus_support_bf16, visible_gpus
from dstrain.planner.choose import MARGIN
from dstrain.planner.cluster import Cluster, detect_gpu_bytes, parse_bytes
from dstrain.planner.memory import plan_memory
from dstrain.planner.read_shape import hub_name, named_config, read_shape
from dstrain.planner.workload import read_properties
from dstrain.preset import read_preset
from dstrain.tasks import fill_learning_rate
from dstrain.units import format_bytes

TEXT_MODELS = tuple(f"qwen3-{size}b" for size in ("32", "14", "8", "4", "1.7", "0.6"))
VISION_MODELS = ("qwen2.5-vl-7b", "qwen2.5-vl-3b")
"""Packaged shapes that are suggested, the largest first."""
VISION_TASKS = ("vlm", "docqa")
MODELS_OF_NONE = ("protein",)
"""Tasks that build their own model."""
UNPLANNED_TASKS = ("temporal",)
"""Tasks with another trained part beside the model, which the planner does not know."""
RESIDENT_PRESETS = ("zero2", "zero3")
"""Presets that a suggestion must fit into: nothing is offloaded, which would be slow."""
LORA = {"rank": 16, "alpha": 32}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices of one host."""

    gpus: int
    gpu_bytes: int | None
    """Free memory of the smallest GPU; None where it is not known."""
    bf16: bool
    cores: int

    def describe(self) -> str:
        """Return the hardware as a phrase."""
        if not self.gpus:
            return f"a CPU with {self.cores} cores"
        memory = f" with {format_bytes(self.gpu_bytes)} free{' each' * (self.gpus > 1)}" if self.gpu_bytes else ""
        precision = "bf16" if self.bf16 else "no bf16"
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)}{memory} ({precision}), {self.cores} cores"

    @property
    def precision(self) -> str:
        """Return what `precision: auto` means here."""
        return "fp32" if not self.gpus else "bf16" if self.bf16 else "fp16"

    @property
    def loader_workers(self) -> int:
        """Return the loader processes of each rank: up to 4, and not more than its share of the cores."""
        return max(1, min(4, self.cores // max(self.gpus, 1)))


@dataclass(frozen=True, kw_only=True)
class ModelSuggestion:
    """A model that fits the hardware."""

    name: str
    """Id on the Hub."""
    use_lora: bool
    """True where full training does not fit."""


def detect_hardware(gpus: int | None = None, gpu_memory: str | None = None) -> Hardware:
    """Return the hardware of this machine, with other GPUs where given. Raises UsageError."""
    sizes = [] if gpu_memory else detect_gpu_bytes(os.environ)[0]
    memory = parse_bytes(gpu_memory, "--gpu-memory") if gpu_memory else min(sizes, default=None)
    count = gpus if gpus is not None else visible_gpus(os.environ) or int(gpu_memory is not None)
    # Without a driver here, the recipe is for another machine: nearly all GPUs since 2020 have bf16.
    return Hardware(
        gpus=count, gpu_bytes=memory if count else None, bf16=gpus_support_bf16() is not False,
        cores=count_available_cores(),
    )  # fmt: skip


def suggest_model(task: str, hardware: Hardware) -> ModelSuggestion | None:
    """Return the largest packaged model that the hardware trains without offloading, with adapters if need be.

    Without a GPU, or if none fits, it is the smallest one. None for tasks that build their own model.
    """
    if task in MODELS_OF_NONE:
        return None
    models = VISION_MODELS if task in VISION_TASKS else TEXT_MODELS
    if hardware.gpus and hardware.gpu_bytes and task not in UNPLANNED_TASKS:
        for name in models:
            for lora in (None, LORA):
                if _fits(task, name, lora, hardware):
                    return ModelSuggestion(name=_hub_id(name), use_lora=lora is not None)
    is_planned = task not in UNPLANNED_TASKS and bool(hardware.gpus and hardware.gpu_bytes)
    return ModelSuggestion(name=_hub_id(models[-1]), use_lora=is_planned)


def _hub_id(shape_name: str) -> str:
    # Of the vision-language models only the tuned ones are published.
    return hub_name(shape_name) + ("-Instruct" if shape_name in VISION_MODELS else "")


def _fits(task: str, shape_name: str, lora: dict[str, Any] | None, hardware: Hardware) -> bool:
    values = {
        "task": task,
        "model": {"config": named_config(shape_name), "lora": lora},
        "data": {"train": [], "max_length": 1024},
        "batch": {"micro": 1, "accumulate": 1},
    }
    cluster = Cluster(gpus_per_node=hardware.gpus, bf16=hardware.bf16)
    try:
        config = fill_learning_rate(RunConfig.model_validate(values))
        properties = read_properties(config)
        if not properties.is_known:
            return False
        shape = read_shape(config, properties)
        plans = [plan_memory(config, read_preset(name), cluster, shape, properties) for name in RESIDENT_PRESETS]
    except DstrainError:  # a preset does not take such a run
        return False
    return min(plan.gpu_bytes for plan in plans) <= (hardware.gpu_bytes or 0) * (1 - MARGIN)
