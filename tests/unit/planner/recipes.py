"""Recipes for the planner's tests."""

from __future__ import annotations

from typing import Any

from dstrain.config.schema import RunConfig
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.shapes import named_config, read_shape
from dstrain.planner.workload import Cluster
from dstrain.preset import read_preset
from dstrain.training.list_parameters import list_base_parameters

GIB = 2**30


def made_config(task: str = "sft", shape: str = "llama-3.1-8b", **sections: Any) -> RunConfig:
    """Return a recipe of a shipped shape; `sections` overrides keys inside sections, or whole values."""
    values: dict[str, Any] = {
        "task": task,
        "model": {"config": named_config(shape), "lora": None, "kernels": "none"},
        "data": {"train": "train.jsonl", "max_length": 1024},
        "batch": {"total": 64, "micro": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(values)


def made_plan(preset: str, config: RunConfig | None = None, gpus: int = 8, nodes: int = 1) -> MemoryPlan:
    """Return the plan of a recipe on GPUs."""
    config = config or made_config()
    shape = read_shape(config, list_base_parameters)
    return plan_memory(config, read_preset(preset), Cluster(gpus_per_node=gpus, nodes=nodes), shape)
