"""Choice of the fastest preset that fits, and of the micro-batch, for `ds_config: auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil

from dstrain.config import RunConfig
from dstrain.errors import Fault, PresetError, UsageError
from dstrain.planner.cluster import Cluster
from dstrain.planner.fixes import PRESETS_BY_SPEED, Budget, suggest_fixes
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.read_shape import read_shape
from dstrain.planner.shape import ModelShape
from dstrain.planner.workload import TaskProperties, read_properties
from dstrain.preset import read_preset
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
        plans = _plans(config, name, cluster, (shape, properties))
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
        raise _nothing_fits(config, cluster, limit, (shape, properties))
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
    config: RunConfig, name: str, cluster: Cluster, model: tuple[ModelShape, TaskProperties]
) -> Iterator[tuple[MemoryPlan, int | None]]:
    """Yield plans with ever smaller micro-batches, and the micro-batch where it is solved. Skips rejected presets."""
    preset = read_preset(name)
    for micro in _micro_sizes(config, cluster):
        batch = config.batch if micro is None else config.batch.model_copy(update={"micro": micro})
        try:
            yield (
                plan_memory(config.model_copy(update={"batch": batch, "ds_config": name}), preset, cluster, *model),
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
    config: RunConfig, cluster: Cluster, limit: Budget, model: tuple[ModelShape, TaskProperties]
) -> PresetError:
    """Return the error that names the preset that needs least, and the change that saves most for its cost."""
    plans = []
    for name in _usable_presets(config, cluster):
        *_, last = [None, *(plan for plan, _ in _plans(config, name, cluster, model))]
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
    fixes = suggest_fixes(smallest, read_preset(best.preset), cluster, model[0], limit)
    enough = [fix for fix in fixes if fix.is_enough]
    named = (enough or sorted(fixes, key=lambda fix: -fix.saved_bytes))[:1]
    fix = f"nearest fix: {named[0].describe()}" if named else "use more GPUs, or a smaller model"
    fix += "" if enough else "; that alone is not enough: use more GPUs or a smaller model" * bool(named)
    problem = (
        f"nothing fits: {best.preset}, which needs least, takes {format_bytes(needed)} of {where} where "
        f"{format_bytes(have)} may be used ({MARGIN:.0%} is left free)"
    )
    return PresetError(Fault("ds_config auto", problem, fix))
