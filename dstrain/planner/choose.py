"""Choose a preset that fits, and a model that fits a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any

from dstrain.config import RunConfig
from dstrain.errors import DstrainError, Fault, PresetError, UsageError
from dstrain.launch.topology import gpus_support_bf16, visible_gpus
from dstrain.planner.fixes import PRESETS_BY_SPEED, Budget, suggest_fixes
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.read_shape import hub_name, named_config, read_shape
from dstrain.planner.workload import Cluster, ModelShape, TaskProperties, detect_gpu_bytes, parse_bytes, read_properties
from dstrain.preset import read_preset
from dstrain.process_setup import count_available_cores
from dstrain.tasks import fill_learning_rate, find_task
from dstrain.tasks.common.text import TextTask
from dstrain.units import format_bytes

AUTO = "auto"
MARGIN = 0.1
"""Share of the memory that a plan leaves free: the worst error of its predictions."""
FULL_PASS_TOKENS = 4096
"""Tokens of a pass that keep a GPU busy. Below it, a slower preset with larger passes may be faster."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The preset and micro-batch that a run takes, and why."""

    preset: str
    micro: int | None
    """Samples per pass; None where the recipe decides it."""
    plan: MemoryPlan
    reason: str


def choose_preset(config: RunConfig, cluster: Cluster, budget: Budget, shape: ModelShape | None = None) -> Choice:
    """Return the fastest preset that fits into the budget less MARGIN, with the largest micro-batch that fits.

    `batch.micro` is solved for `batch.total` where the recipe has neither micro, accumulate nor tokens_per_micro.
    Raises PresetError, naming the nearest fix, where nothing fits.
    """
    properties = read_properties(config)
    shape = shape or read_shape(config, properties)
    limit = Budget(gpu_bytes=int(budget.gpu_bytes * (1 - MARGIN)), host_bytes=_less_margin(budget.host_bytes))
    found: list[tuple[MemoryPlan, int | None]] = []
    too_large: list[str] = []
    for name in _usable_presets(config, cluster):
        plans = _plans(config, name, cluster, shape, properties)
        if (first := next(plans, None)) is None:
            continue  # the preset does not run this optimizer or precision
        fitting = next((one for one in chain([first], plans) if limit.fits(one[0])), None)
        if fitting is None:
            too_large.append(name)
            continue
        found.append(fitting)
        if fitting[1] is None or fitting[0].workload.tokens >= FULL_PASS_TOKENS or _is_whole_step(fitting[0]):
            break
    if not found:
        raise _nothing_fits(config, cluster, limit, shape, properties)
    plan, micro = max(found, key=lambda one: (min(one[0].workload.tokens, FULL_PASS_TOKENS), -found.index(one)))
    return Choice(preset=plan.preset, micro=micro, plan=plan, reason=_explain(plan, micro, too_large, limit))


def _less_margin(size: int | None) -> int | None:
    return None if size is None else int(size * (1 - MARGIN))


def _usable_presets(config: RunConfig, cluster: Cluster) -> Iterator[str]:
    """Yield the presets that are worth trying, fastest first."""
    for name in PRESETS_BY_SPEED:
        # Stage 0 communicates after the backward pass, and sums bf16 gradients in bf16: zero1 is better but alone in fp32.
        is_fp32 = config.precision == "fp32" or (config.precision == AUTO and cluster.kind == "cpu")
        # Muon with a clip runs at stage 0 alone, as adafactor does.
        needs_stage_0 = config.optim.name == "adafactor" or (config.optim.name == "muon" and config.optim.clip)
        if name == "zero0" and not needs_stage_0 and not (cluster.world_size == 1 and is_fp32):
            continue
        if cluster.kind == "cpu" and "offload" in name:
            continue  # the device's memory is the host's
        yield name


def _plans(
    config: RunConfig, name: str, cluster: Cluster, shape: ModelShape, properties: TaskProperties
) -> Iterator[tuple[MemoryPlan, int | None]]:
    """Yield plans with ever smaller micro-batches, and the micro-batch where it is solved. Skips rejected presets."""
    preset = read_preset(name)
    for micro in _micro_sizes(config, cluster):
        batch = config.batch if micro is None else config.batch.model_copy(update={"micro": micro})
        try:
            yield (
                plan_memory(
                    config.model_copy(update={"batch": batch, "ds_config": name}), preset, cluster, shape, properties
                ),
                micro,
            )
        except UsageError:  # an optimizer or precision that the preset does not run
            return


def _micro_sizes(config: RunConfig, cluster: Cluster) -> Iterator[int | None]:
    """Yield the sizes of passes that divide a process's share of the total into equal ones, largest first."""
    batch = config.batch
    if batch.total is None or batch.micro or batch.accumulate or batch.tokens_per_micro:
        yield None
        return
    share, seen = ceil(batch.total / cluster.world_size), 0
    for passes in range(1, share + 1):
        micro = ceil(share / passes)
        if micro != seen:
            yield micro
        seen = micro


def _is_whole_step(plan: MemoryPlan) -> bool:
    return plan.batch.accumulate == 1


def _explain(plan: MemoryPlan, micro: int | None, too_large: list[str], limit: Budget) -> str:
    passes = "" if micro is None else f", batch.micro {micro} (x {plan.batch.accumulate} passes)"
    where = "process" if plan.cluster.kind == "cpu" else "GPU"
    free = f"{format_bytes(plan.gpu_bytes)} of {format_bytes(limit.gpu_bytes / (1 - MARGIN))} per {where}"
    slower = f"; {', '.join(too_large)} would need more" if too_large else ""
    return f"{plan.preset}{passes}: the fastest that fits with {MARGIN:.0%} free, {free}{slower}"


def _nothing_fits(
    config: RunConfig, cluster: Cluster, limit: Budget, shape: ModelShape, properties: TaskProperties
) -> PresetError:
    """Return the error that names the preset that needs least, and the change that saves most for its cost."""
    plans = []
    for name in _usable_presets(config, cluster):
        *_, last = [None, *(plan for plan, _ in _plans(config, name, cluster, shape, properties))]
        plans += [last] if last is not None else []
    if not plans:
        return PresetError(
            Fault("ds_config auto", "no preset runs this optimizer and precision", "name one, or change them")
        )
    best = min(plans, key=lambda plan: sum(limit.missing(plan)))
    gpu, host = limit.missing(best)
    needed, have, where = best.gpu_bytes, limit.gpu_bytes, "a GPU"
    if cluster.kind == "cpu":
        where = "a process"
    if host and not gpu:
        needed, have, where = best.host_bytes_per_node, limit.host_bytes or 0, "a host"
    smallest = config.model_copy(
        update={
            "batch": config.batch.model_copy(
                update={"micro": best.batch.micro, "total": best.batch.total, "accumulate": None}
            )
        }
    )
    fixes = suggest_fixes(smallest, read_preset(best.preset), cluster, shape, limit)
    enough = [fix for fix in fixes if fix.is_enough]
    named = (enough or sorted(fixes, key=lambda fix: -fix.saved_bytes))[:1]
    fix = f"nearest fix: {named[0].describe()}" if named else "use more GPUs, or a smaller model"
    fix += "" if enough else "; that alone is not enough: use more GPUs or a smaller model" * bool(named)
    problem = (
        f"nothing fits: {best.preset}, which needs least, takes {format_bytes(needed)} of {where} where "
        f"{format_bytes(have)} may be used ({MARGIN:.0%} is left free)"
    )
    return PresetError(Fault("ds_config auto", problem, fix))


TEXT_MODELS = tuple(f"qwen3-{size}b" for size in ("32", "14", "8", "4", "1.7", "0.6"))
VISION_MODELS = ("qwen2.5-vl-7b", "qwen2.5-vl-3b")
"""Packaged shapes that are suggested, the largest first."""
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
    found = find_task(task)
    if not issubclass(found, TextTask):
        return None
    models = VISION_MODELS if found.needs_vision else TEXT_MODELS
    is_planned = found.is_planned and bool(hardware.gpus and hardware.gpu_bytes)
    if is_planned:
        for name in models:
            for lora in (None, LORA):
                if _fits(task, name, lora, hardware):
                    return ModelSuggestion(name=_hub_id(name), use_lora=lora is not None)
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
