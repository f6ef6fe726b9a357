"""Changes of a recipe that save memory, in the order of what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.config import RunConfig
from dstrain.config.schema import LoraConfig
from dstrain.errors import UsageError
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.read_shape import read_shape
from dstrain.planner.workload import Cluster, ModelShape, read_properties
from dstrain.preset import Preset, read_preset
from dstrain.units import format_bytes

PRESETS_BY_SPEED = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme")
"""Fastest first: weights that stay whole need no gathering, and states on a device no copies over PCIe."""
LORA = {"rank": 16}
LEARNING_KEYS = ("model.lora", "data.max_length")
"""Keys that change what is learnt, unlike the others."""


@dataclass(frozen=True)
class Fix:
    """Recipe keys to set, and what that saves."""

    changes: Mapping[str, Any]
    """Recipe key -> value."""
    saved_bytes: int
    """Of one GPU's peak, or of one host's memory where that is too small."""
    before: Mapping[str, Any]
    """Recipe key -> value now."""
    is_enough: bool = True
    """True where the run fits with this change alone."""

    def describe(self) -> str:
        """Return `batch.micro 4 -> 2 saves 3.1 GiB`."""
        words = [f"{key} {_show(self.before.get(key))} -> {_show(value)}" for key, value in self.changes.items()]
        learning = " (changes what is learnt)" if any(key in LEARNING_KEYS for key in self.changes) else ""
        return f"{', '.join(words)} saves {format_bytes(self.saved_bytes)}{learning}"


def _show(value: Any) -> str:
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
    config: RunConfig, preset: Preset, cluster: Cluster, shape: ModelShape | None = None, budget: Budget | None = None
) -> list[Fix]:
    """Return changes that save memory, those first that cost least speed; without `budget`, for a GPU that is too small.

    Each is computed by planning the changed recipe. Changes that save nothing, or that the recipe does not allow, are
    left out. Raises what `plan_memory` raises for the recipe itself.
    """
    properties = read_properties(config)
    shape = shape or read_shape(config, properties)
    plan = plan_memory(config, preset, cluster, shape, properties)
    is_short_on_host = budget is not None and budget.missing(plan)[0] == 0 and budget.missing(plan)[1] > 0
    found: list[Fix] = []
    for changes, is_step in _candidates(config, preset, plan):
        try:
            changed, other = with_changes(config, preset, changes)
            changed_traits = properties if _keeps_properties(changes) else read_properties(changed)
            new_shape = read_shape(changed, changed_traits) if "model.lora" in changes else shape
            after = plan_memory(changed, other, cluster, new_shape, changed_traits)
        except UsageError:
            continue
        if is_short_on_host:
            saved = plan.host_bytes_per_node - after.host_bytes_per_node
        else:
            saved = plan.gpu_bytes - after.gpu_bytes
        fix = Fix(changes, saved, _values_before(config, preset, plan, changes), budget is None or budget.fits(after))
        if is_step and found and found[-1].changes.keys() == changes.keys() and not found[-1].is_enough:
            found.pop()  # the smaller step was not enough
        elif is_step and found and found[-1].changes.keys() == changes.keys():
            continue
        if saved > 0:
            found.append(fix)
    return found


def _keeps_properties(changes: Mapping[str, Any]) -> bool:
    """Return True where a change of these keys leaves what the planner reads from the task as it is."""
    return not any(key.startswith(("options.", "model.lora")) for key in changes)


def _candidates(config: RunConfig, preset: Preset, plan: MemoryPlan) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield (changes, whether they are a further step of the ones before), cheapest first."""
    if plan.find("reference model") is not None:
        yield {"options.precompute_ref_log_probs": True}, False
    batch, step = config.batch, False
    if batch.tokens_per_micro:
        least = plan.workload.length if not plan.workload.is_packed else config.data.max_length
        tokens = batch.tokens_per_micro // 2
        while tokens >= least:
            yield {"batch.tokens_per_micro": tokens}, step
            tokens, step = tokens // 2, True
    elif plan.batch.accumulate is not None:
        yield from _reduced_micro_batch(config, plan)
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": True}, False
    slower = (
        PRESETS_BY_SPEED[PRESETS_BY_SPEED.index(preset.name) + 1 :]
        if preset.name in PRESETS_BY_SPEED
        else PRESETS_BY_SPEED
    )
    yield from (({"ds_config": name}, False) for name in slower)
    if config.model.lora is None:
        yield {"model.lora": LORA}, False
    if config.data.max_length >= 256:
        yield {"data.max_length": config.data.max_length // 2}, False


def _reduced_micro_batch(config: RunConfig, plan: MemoryPlan) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield halved micro-batches with the same total."""
    batch, accumulate = config.batch, plan.batch.accumulate or 1
    micro, times, is_further = plan.batch.largest_micro(plan.cluster.world_size) // 2, 2, False
    while micro >= 1:
        changes: dict[str, Any] = {"batch.micro": micro}
        if batch.total is None or batch.accumulate is not None:
            changes["batch.accumulate"] = accumulate * times
        if batch.micro is None and batch.accumulate is not None:
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


def _values_before(config: RunConfig, preset: Preset, plan: MemoryPlan, changes: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {
        "ds_config": preset.name,
        "batch.micro": plan.batch.largest_micro(plan.cluster.world_size),
        "batch.accumulate": plan.batch.accumulate,
        "options.precompute_ref_log_probs": False,
    }
    values = config.model_dump()
    return {
        key: known[key] if key in known else values[key.partition(".")[0]].get(key.partition(".")[2]) for key in changes
    }
