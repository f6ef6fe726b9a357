"""Choose: a preset that fits, changes that save memory in the order of what they cost, a model for the hardware."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Any

from dstrain.config import BatchPlan, RunConfig
from dstrain.config.schema import LoraConfig
from dstrain.errors import DstrainError, Fault, PresetError, UsageError
from dstrain.host_limits import count_available_cores
from dstrain.launch.topology import gpus_support_bf16, visible_gpus
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.shapes import ListBase, ModelShape, named_config, read_properties, read_shape, suggested_models
from dstrain.planner.workload import Cluster, detect_gpu_bytes, parse_bytes
from dstrain.preset import Preset, read_preset
from dstrain.tasks import fill_defaults, find_task
from dstrain.units import format_bytes

PRESETS_BY_SPEED = (
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero3_partial_offload",
    "zero2_offload",
    "zero3_offload",
    "zero3_nvme",
)
"""Fastest first: weights that stay whole need no gathering, and states on a device no copies over PCIe."""
LORA = {"rank": 16}
LEARNING_KEYS = ("model.lora", "data.max_length")
"""Keys that change what is learnt, unlike the others."""


@dataclass(frozen=True)
class Fix:
    """Recipe keys to set, and what that saves."""

    changes: Mapping[str, Any]
    """Recipe key -> value."""
    saved_bytes: int | None
    """Of one GPU's peak, or of one host's memory where that is too small; None where the model's shape is not known."""
    before: Mapping[str, Any]
    """Recipe key -> value now."""
    is_enough: bool = True
    """True where the run fits with this change alone."""

    def describe(self) -> str:
        """Return `batch.micro 4 -> 2 saves 3.1 GiB`, or without the size where it is not known."""
        words = [f"{key} {_show(self.before.get(key))} -> {_show(value)}" for key, value in self.changes.items()]
        learning = " (changes what is learnt)" if any(key in LEARNING_KEYS for key in self.changes) else ""
        saves = "" if self.saved_bytes is None else f" saves {format_bytes(self.saved_bytes)}"
        return f"{', '.join(words)}{saves}{learning}"


def _show(value: Any) -> str:
    """Return a value as a recipe has it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_show(one)}' for key, one in value.items())}}}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that a run may use."""

    gpu_bytes: int
    host_bytes: int | None = None
    """Of one host, for all its processes; None: not limited."""

    def missing(self, plan: MemoryPlan) -> tuple[int, int]:
        """Return the bytes that are missing on a GPU and on a host; 0 where it fits."""
        host = 0 if self.host_bytes is None else max(0, plan.host_bytes_per_node - self.host_bytes)
        return max(0, plan.gpu_bytes - self.gpu_bytes), host

    def fits(self, plan: MemoryPlan) -> bool:
        """Return True where GPU and host have enough."""
        return self.missing(plan) == (0, 0)


def suggest_fixes(
    config: RunConfig,
    preset: Preset,
    cluster: Cluster,
    shape: ModelShape,
    budget: Budget | None = None,
    list_base: ListBase | None = None,
) -> list[Fix]:
    """Return changes that save memory, those first that cost least speed; without `budget`, for a GPU that is too small.

    Each is computed by planning the changed recipe. Changes that save nothing, or that the recipe does not allow, are
    left out. `list_base`: as in `read_shape`. Raises what `plan_memory` raises for the recipe itself.
    """
    plan = plan_memory(config, preset, cluster, shape)
    is_short_on_host = budget is not None and budget.missing(plan)[0] == 0 and budget.missing(plan)[1] > 0
    found: list[Fix] = []
    for changes, is_step in _candidates(config, preset, plan.batch, cluster.world_size, plan):
        try:
            changed, other = with_changes(config, preset, changes)
            new_shape = shape
            if "model.lora" in changes:
                new_shape = read_shape(changed, list_base)
            elif any(key.startswith("options.") for key in changes):
                new_shape = replace(shape, task=read_properties(changed))
            after = plan_memory(changed, other, cluster, new_shape)
        except UsageError:
            continue
        if is_short_on_host:
            saved = plan.host_bytes_per_node - after.host_bytes_per_node
        else:
            saved = plan.gpu_bytes - after.gpu_bytes
        if is_step and found and found[-1].changes.keys() == changes.keys():
            if found[-1].is_enough:
                continue
            found.pop()  # the smaller step was not enough
        if saved > 0:
            before = _values_before(config, preset, plan.batch, cluster.world_size, changes)
            found.append(Fix(changes, saved, before, budget is None or budget.fits(after)))
    return found


def list_fixes(config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int) -> list[Fix]:
    """Return the changes that `suggest_fixes` tries, without their sizes: for a model whose shape is not known."""
    changes = [one for one, is_step in _candidates(config, preset, batch, world_size, None) if not is_step]
    return [Fix(one, None, _values_before(config, preset, batch, world_size, one)) for one in changes]


def _candidates(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int, plan: MemoryPlan | None
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield (changes, whether they are a further step of the ones before), cheapest first; `plan`: where there is one."""
    if plan is not None and plan.find("reference model") is not None:
        yield {"options.precompute_ref_log_probs": True}, False
    if config.batch.tokens_per_micro:
        is_padded = plan is not None and not plan.workload.is_packed
        least = plan.workload.length if plan is not None and is_padded else config.data.max_length
        tokens, step = config.batch.tokens_per_micro // 2, False
        while tokens >= least:
            yield {"batch.tokens_per_micro": tokens}, step
            tokens, step = tokens // 2, True
    elif batch.accumulate is not None:
        yield from _reduced_micro_batch(config, batch, world_size)
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": True}, False
    at = PRESETS_BY_SPEED.index(preset.name) + 1 if preset.name in PRESETS_BY_SPEED else 0
    yield from (({"ds_config": name}, False) for name in PRESETS_BY_SPEED[at:])
    if config.model.lora is None:
        yield {"model.lora": LORA}, False
    sequence = 2 * batch.sequence
    if world_size % sequence == 0 and config.batch.total and config.batch.accumulate is None:
        yield {"parallel.sequence": sequence}, False
    if config.data.max_length >= 256:
        yield {"data.max_length": config.data.max_length // 2}, False


def _reduced_micro_batch(config: RunConfig, batch: BatchPlan, world_size: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield halved micro-batches with the same total."""
    written, accumulate = config.batch, batch.accumulate or 1
    micro, times, is_further = batch.largest_micro(world_size) // 2, 2, False
    while micro >= 1:
        changes: dict[str, Any] = {"batch.micro": micro}
        if written.total is None or written.accumulate is not None:
            changes["batch.accumulate"] = accumulate * times
        if written.micro is None and written.accumulate is not None:
            del changes["batch.micro"]
        yield changes, is_further
        micro, times, is_further = micro // 2, times * 2, True


def with_changes(config: RunConfig, preset: Preset, changes: Mapping[str, Any]) -> tuple[RunConfig, Preset]:
    """Return the recipe and the preset with recipe keys set, such as `batch.micro` and `ds_config`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if key == "ds_config":
            preset = read_preset(value)
            config = config.model_copy(update={"ds_config": value})
        elif section == "options":
            config = config.model_copy(update={"options": {**config.options, name: value}})
        else:
            value = LoraConfig.model_validate(value) if name == "lora" else value
            block = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: block})
    return config, preset


def _values_before(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int, changes: Mapping[str, Any]
) -> dict[str, Any]:
    known: dict[str, Any] = {
        "ds_config": preset.name,
        "batch.micro": batch.largest_micro(world_size),
        "batch.accumulate": batch.accumulate,
        "options.precompute_ref_log_probs": False,
    }
    values = config.model_dump()
    return {
        key: known[key] if key in known else values[key.partition(".")[0]].get(key.partition(".")[2]) for key in changes
    }


AUTO = "auto"
MARGIN = 0.1
"""Share of the memory that a plan leaves free. docs/measurements/planner.md compares plans with published figures: those
of the same software took up to 11 % more than planned, others up to 40 %."""
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
    shape = shape or read_shape(config)
    host = None if budget.host_bytes is None else int(budget.host_bytes * (1 - MARGIN))
    limit = Budget(gpu_bytes=int(budget.gpu_bytes * (1 - MARGIN)), host_bytes=host)
    found: list[tuple[MemoryPlan, int | None]] = []
    too_large: list[str] = []
    for name in _usable_presets(config, cluster):
        plans = _plans(config, name, cluster, shape)
        if (first := next(plans, None)) is None:
            continue  # the preset does not run this optimizer or precision
        fitting = next((one for one in chain([first], plans) if limit.fits(one[0])), None)
        if fitting is None:
            too_large.append(name)
            continue
        found.append(fitting)
        if fitting[1] is None or fitting[0].workload.tokens >= FULL_PASS_TOKENS or fitting[0].batch.accumulate == 1:
            break
    if not found:
        raise _nothing_fits(config, cluster, limit, shape)
    plan, micro = max(found, key=lambda one: (min(one[0].workload.tokens, FULL_PASS_TOKENS), -found.index(one)))
    return Choice(preset=plan.preset, micro=micro, plan=plan, reason=_explain(plan, micro, too_large, limit))


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
    config: RunConfig, name: str, cluster: Cluster, shape: ModelShape
) -> Iterator[tuple[MemoryPlan, int | None]]:
    """Yield plans with ever smaller micro-batches, and the micro-batch where it is solved. Skips rejected presets."""
    preset = read_preset(name)
    for micro in _micro_sizes(config, cluster):
        batch = config.batch if micro is None else config.batch.model_copy(update={"micro": micro})
        changed = config.model_copy(update={"batch": batch, "ds_config": name})
        try:
            yield plan_memory(changed, preset, cluster, shape), micro
        except UsageError:  # an optimizer or precision that the preset does not run
            return


def _micro_sizes(config: RunConfig, cluster: Cluster) -> Iterator[int | None]:
    """Yield the sizes of passes that divide a process's share of the total into equal ones, largest first."""
    batch = config.batch
    if batch.total is None or batch.micro or batch.accumulate or batch.tokens_per_micro:
        yield None
        return
    share, seen = ceil(batch.total * config.parallel.sequence / cluster.world_size), 0
    for passes in range(1, share + 1):
        micro = ceil(share / passes)
        if micro != seen:
            yield micro
        seen = micro


def _explain(plan: MemoryPlan, micro: int | None, too_large: list[str], limit: Budget) -> str:
    passes = "" if micro is None else f", batch.micro {micro} (x {plan.batch.accumulate} passes)"
    where = "process" if plan.cluster.kind == "cpu" else "GPU"
    free = f"{format_bytes(plan.gpu_bytes)} of {format_bytes(limit.gpu_bytes / (1 - MARGIN))} per {where}"
    slower = f"; {', '.join(too_large)} would need more" if too_large else ""
    if plan.is_offloaded and limit.host_bytes is None:
        slower += f"; a host needs {format_bytes(plan.host_bytes_per_node)}, which is not checked without --host-memory"
    return f"{plan.preset}{passes}: the fastest that fits with {MARGIN:.0%} free, {free}{slower}"


def _nothing_fits(config: RunConfig, cluster: Cluster, limit: Budget, shape: ModelShape) -> PresetError:
    """Return the error that names the preset that needs least, and the change that saves most for its cost."""
    plans = []
    for name in _usable_presets(config, cluster):
        *_, last = [None, *(plan for plan, _ in _plans(config, name, cluster, shape))]
        plans += [last] if last is not None else []
    if not plans:
        return PresetError(
            Fault("ds_config auto", "no preset runs this optimizer and precision", "name one, or change them")
        )
    best = min(plans, key=lambda plan: sum(limit.missing(plan)))
    gpu, host = limit.missing(best)
    needed, have, where = best.gpu_bytes, limit.gpu_bytes, "a process" if cluster.kind == "cpu" else "a GPU"
    if host and not gpu:
        needed, have, where = best.host_bytes_per_node, limit.host_bytes or 0, "a host"
    sizes = {"micro": best.batch.micro, "total": best.batch.total, "accumulate": None}
    smallest = config.model_copy(update={"batch": config.batch.model_copy(update=sizes)})
    fixes = suggest_fixes(smallest, read_preset(best.preset), cluster, shape, limit)
    enough = [fix for fix in fixes if fix.is_enough]
    named = (enough or sorted(fixes, key=lambda fix: -(fix.saved_bytes or 0)))[:1]
    fix = f"nearest fix: {named[0].describe()}" if named else "use more GPUs, or a smaller model"
    fix += "" if enough else "; that alone is not enough: use more GPUs or a smaller model" * bool(named)
    problem = (
        f"nothing fits: {best.preset}, which needs least, takes {format_bytes(needed)} of {where} where "
        f"{format_bytes(have)} may be used ({MARGIN:.0%} is left free)"
    )
    return PresetError(Fault("ds_config auto", problem, fix))


RESIDENT_PRESETS = ("zero2", "zero3")
"""Presets that a suggestion must fit into: nothing is offloaded, which would be slow."""
SUGGESTED_LORA = {"rank": 16, "alpha": 32}


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


def suggest_model(task: str, hardware: Hardware) -> tuple[str | None, bool]:
    """Return the Hub id of the largest packaged model that the hardware trains without offloading; True if with adapters.

    Without a GPU, or if none fits, it is the smallest one. None for tasks that build their own model.
    """
    found = find_task(task)
    if not found.names_model:
        return None, False
    models = suggested_models("vision" if found.needs_vision else "text")
    is_planned = found.is_planned and bool(hardware.gpus and hardware.gpu_bytes)
    if is_planned:
        for name, hub_id in models.items():
            for lora in (None, SUGGESTED_LORA):
                if _fits(task, name, lora, hardware):
                    return hub_id, lora is not None
    return [*models.values()][-1], is_planned


def _fits(task: str, shape_name: str, lora: dict[str, Any] | None, hardware: Hardware) -> bool:
    values = {
        "task": task,
        "model": {"config": named_config(shape_name), "lora": lora},
        "data": {"train": [], "max_length": 1024},
        "batch": {"micro": 1, "accumulate": 1},
    }
    cluster = Cluster(gpus_per_node=hardware.gpus, bf16=hardware.bf16)
    try:
        config = fill_defaults(RunConfig.model_validate(values), find_task(task))
        if not read_properties(config).is_known:
            return False
        shape = read_shape(config)
        plans = [plan_memory(config, read_preset(name), cluster, shape) for name in RESIDENT_PRESETS]
    except DstrainError:  # a preset does not take such a run
        return False
    return min(plan.gpu_bytes for plan in plans) <= (hardware.gpu_bytes or 0) * (1 - MARGIN)
