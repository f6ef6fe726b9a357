"""`dstrain plan`: memory of a recipe with every preset, without starting anything. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dstrain.commands.recipe_args import find_recipe, find_run
from dstrain.config import RunConfig, read_recipe
from dstrain.errors import DstrainError, UsageError
from dstrain.files import find_path
from dstrain.launch.topology import visible_gpus
from dstrain.planner.choose import AUTO, MARGIN, Budget, Choice, choose_preset, suggest_fixes
from dstrain.planner.lines import MOMENTS
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.roofline import COMMON_GPUS, compute_roofline, describe_roofline
from dstrain.planner.shapes import ModelShape, describe_counts, named_config, read_shape
from dstrain.planner.workload import (
    COMMON_GPU_BYTES,
    GPU_SOURCES,
    Cluster,
    detect_gpu_bytes,
    detect_gpu_name,
    host_bytes,
    parse_bytes,
)
from dstrain.preset import preset_names, read_preset
from dstrain.tasks import TaskOptions, fill_defaults, find_task
from dstrain.units import format_bytes, format_count

MAX_FIXES = 3


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of `dstrain plan`."""

    recipe: str | None = None
    task: str | None = None
    ds_config: str | None = None
    overrides: Sequence[str] = ()
    gpu_memory: str | None = None
    host_memory: str | None = None
    gpus: int | None = None
    nodes: int = 1
    model_shape: str | None = None
    images: int | None = None
    """Images of a row; None: those of the task."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What `dstrain plan` prints."""

    config: RunConfig
    plans: list[MemoryPlan | str]
    """Of each preset; NAME: why not, for one that the recipe cannot use."""
    budgets: dict[str, Budget]
    memory_source: str
    choice: Choice | None
    refusal: str
    """Why there is no choice; empty where there is one."""
    fixes: list[str]
    """Cheapest changes, where the recipe's own preset does not fit."""
    gpu_name: str | None
    """Of this machine's GPU, where the plan is for it."""
    shown: MemoryPlan | None
    """The plan whose lines are listed: of the recipe's preset, or of the chosen one."""


def make_report(request: PlanRequest) -> PlanReport:
    """Plan the recipe with every preset. Raises UsageError."""
    config = read_plan_recipe(request)
    memory, source = _memory_per_gpu(request)
    gpus = request.gpus or visible_gpus(os.environ) or 1
    cluster = Cluster(gpus_per_node=gpus, nodes=request.nodes)
    shape = read_shape(config)
    if request.images is not None:
        shape = replace(shape, task=replace(shape.task, images_per_row=request.images))
    if config.ds_config != AUTO:
        read_preset(config.ds_config)  # a name or file that is wrong is an error, not a row of the table
    names = preset_names() if config.ds_config in (AUTO, *preset_names()) else [*preset_names(), config.ds_config]
    plans = [_plan_or_reason(config, name, cluster, shape) for name in names]
    host = _host_memory(request, source)
    budgets = {format_bytes(size): Budget(gpu_bytes=size, host_bytes=host) for size in memory}
    choice, refusal = None, "no size of GPU memory is known; give one with --gpu-memory"
    if len(memory) == 1:
        try:
            choice, refusal = choose_preset(config, cluster, budgets[format_bytes(memory[0])], shape), ""
        except UsageError as error:
            refusal = str(error)
    own = dict(zip(names, plans, strict=True)).get(config.ds_config)
    shown = own if isinstance(own, MemoryPlan) else choice.plan if choice else None
    fixes = _fixes(config, shown, shape, budgets[format_bytes(memory[0])]) if len(memory) == 1 and shown else []
    return PlanReport(
        config=config,
        plans=plans,
        budgets=budgets,
        memory_source=source,
        choice=choice,
        refusal=refusal,
        fixes=fixes,
        gpu_name=detect_gpu_name(os.environ) if source in GPU_SOURCES else None,
        shown=shown,
    )


def read_plan_recipe(request: PlanRequest) -> RunConfig:
    """Return the recipe with the task's defaults. Data files need not exist here. Raises UsageError."""
    path = find_recipe(request.recipe, bool(request.task or request.overrides or request.ds_config))
    recipe = read_recipe(path, request.overrides, request.task, request.ds_config, TaskOptions())
    config, model = recipe.config, recipe.config.model
    if request.model_shape is not None:
        model = model.model_copy(update={"path": None, "config": named_config(request.model_shape)})
    elif (run := find_run(model.path, recipe.folder)) is not None:  # its shapes, without an export
        trained = read_recipe(run[0] / "recipe.yaml").config.model
        base = str(run[0] / "model") if (run[0] / "model" / "config.json").is_file() else trained.path
        model = model.model_copy(update={"path": base, "config": trained.config})
    elif model.path is not None and (found := find_path(model.path, recipe.folder)) is not None:
        model = model.model_copy(update={"path": str(found)})
    ds_config = config.ds_config
    if ds_config.endswith(".json") and (file := find_path(ds_config, recipe.folder)) is not None:
        ds_config = str(file)
    config = config.model_copy(update={"model": model, "ds_config": ds_config})
    return fill_defaults(config, find_task(config.task))


def _memory_per_gpu(request: PlanRequest) -> tuple[list[int], str]:
    """Return the bytes of a GPU, and where they are known from; several sizes where they are not known."""
    if request.gpu_memory is not None:
        return [parse_bytes(request.gpu_memory, "--gpu-memory")], "--gpu-memory"
    found, source = detect_gpu_bytes(os.environ)
    return ([min(found)], source) if found else (list(COMMON_GPU_BYTES), "common sizes: there is no GPU here")


def _host_memory(request: PlanRequest, source: str) -> int | None:
    """Return the bytes that a host has: of this one, where its GPUs are planned for; None where it is not known."""
    if request.host_memory is not None:
        return parse_bytes(request.host_memory, "--host-memory")
    is_here = request.gpu_memory is None and source in GPU_SOURCES and request.nodes == 1
    return host_bytes() if is_here else None


def _plan_or_reason(config: RunConfig, name: str, cluster: Cluster, shape: ModelShape) -> MemoryPlan | str:
    try:
        return plan_memory(config, read_preset(name), cluster, shape)
    except DstrainError as error:
        return f"{name}: {str(error).splitlines()[0]}"


def _fixes(config: RunConfig, plan: MemoryPlan, shape: ModelShape, budget: Budget) -> list[str]:
    if budget.fits(plan):
        return []
    name = plan.preset if config.ds_config == AUTO else config.ds_config
    fixes = suggest_fixes(config, read_preset(name), plan.cluster, shape, budget)
    # Those that are enough alone come first; each list is already in the order of cost.
    chosen = [*(fix for fix in fixes if fix.is_enough), *(fix for fix in fixes if not fix.is_enough)][:MAX_FIXES]
    return [fix.describe() + ("" if fix.is_enough else ", not enough alone") for fix in chosen]


def show_report(report: PlanReport, has_formulas: bool = False) -> str:
    """Return the report as text; `has_formulas`: with the formula and the source of each line."""
    plans = [plan for plan in report.plans if isinstance(plan, MemoryPlan)]
    if not plans:
        return "\n".join(map(str, report.plans))
    parts = [
        describe_run(report.config.task, report.shown or plans[0]),
        "",
        show_presets(report.plans, report.budgets, MARGIN),
    ]
    parts += [f"GPU memory: {report.memory_source}; barely: fits with less than {MARGIN:.0%} free", ""]
    parts += [f"choice: {report.choice.reason}" if report.choice else f"choice: none. {report.refusal}"]
    if report.fixes and report.shown:
        parts += ["", f"{report.shown.preset} does not fit. Cheapest fixes:", *(f"  {line}" for line in report.fixes)]
    if report.shown is not None:
        parts += ["", f"{report.shown.preset}, line by line, for one process", show_lines(report.shown, has_formulas)]
        parts += ["", show_saved_bytes(report.shown), describe_roofline(_roofline(report), report.gpu_name)]
    return "\n".join(parts)


def report_as_json(report: PlanReport) -> str:
    """Return the report as JSON, with every line of every plan."""
    rows: list[Mapping[str, Any]] = []
    for plan in report.plans:
        if isinstance(plan, str):
            name, _, why = plan.partition(": ")
            rows.append({"preset": name, "refused": why})
            continue
        fits = {name: budget.fits(plan) for name, budget in report.budgets.items()}
        rows.append({**plan.as_json(), "fits": fits})
    choice = report.choice and {
        "preset": report.choice.preset,
        "micro": report.choice.micro,
        "reason": report.choice.reason,
    }
    values = {
        "choice": choice, "refusal": report.refusal, "fixes": report.fixes, "margin": MARGIN,
        "roofline": _roofline(report), "presets": rows,
    }  # fmt: skip
    return json.dumps(values, indent=2)


def _roofline(report: PlanReport) -> dict[str, Any] | None:
    """Return what is computed from the peaks of the plan's GPU, or of common ones; None without a plan to show."""
    gpus = COMMON_GPUS if report.gpu_name is None else (report.gpu_name,)
    return None if report.shown is None else compute_roofline(report.shown.run, gpus)


def show_saved_bytes(plan: MemoryPlan) -> str:
    """Return a line with what autograd keeps of the decoder, with and without fused kernels."""
    saved, is_fused = plan.saved_bytes, plan.run.has_fused_kernels
    return (
        f"kept of the decoder for the backward pass: {format_bytes(saved['none'])}, {format_bytes(saved['liger'])} with "
        f"fused kernels; planned {'with' if is_fused else 'without'} them (model.kernels)"
    )


def describe_run(task: str, plan: MemoryPlan) -> str:
    """Return the model, the machines and the batch of a plan in two lines."""
    shape, cluster = plan.shape, plan.cluster
    parts = describe_counts(shape)
    named = ", ".join(f"{part} {format_count(count)}" for part, count in parts.items() if part != "trained")
    hosts = f"{cluster.nodes} host{'s' * (cluster.nodes > 1)} x {cluster.gpus_per_node} {'GPUs' if cluster.kind == 'cuda' else 'processes'}"
    return (
        f"{task}: {shape.model_type or 'model'}, {format_count(shape.count())} parameters ({named}), "
        f"{format_count(parts['trained'])} trained; counted from {shape.param_source}\n"
        f"{hosts}, {plan.precision}; steps of {plan.batch.describe(cluster.world_size)}, "
        f"{plan.workload.tokens} tokens per pass at most"
    )


def show_presets(plans: Sequence[MemoryPlan | str], budgets: Mapping[str, Budget], margin: float) -> str:
    """Return a table of presets: memory per GPU, host and disk, and whether it fits each budget.

    `plans`: a plan, or `NAME: why not` for a preset that the recipe cannot use.
    """
    header = ["preset", "per GPU", "per host", "disk per host", *(f"fits {name}" for name in budgets)]
    rows, notes = [header], []
    for plan in plans:
        if isinstance(plan, str):
            notes.append(plan)
            continue
        sizes = [
            format_bytes(size) if size else "-"
            for size in (plan.gpu_bytes, plan.host_bytes_per_node, plan.nvme_bytes_per_node)
        ]
        rows.append([plan.preset, *sizes, *(_status(plan, budget, margin) for budget in budgets.values())])
    return "\n".join([_align(rows, range(1, 4)), *notes])


def _status(plan: MemoryPlan, budget: Budget, margin: float) -> str:
    gpu, host = budget.missing(plan)
    if host and not gpu:
        return f"no, host lacks {format_bytes(host)}"
    if gpu:
        return f"no, lacks {format_bytes(gpu)}"
    word = "yes" if plan.gpu_bytes <= budget.gpu_bytes * (1 - margin) else "barely"
    return f"{word}, host not checked" if budget.host_bytes is None and plan.is_offloaded else word


def show_lines(plan: MemoryPlan, has_formulas: bool) -> str:
    """Return every line of a plan, if asked with its formula and source, and the peak that they make."""
    columns = 6 if has_formulas else 4
    rows = [["what", "where", "when", "size", "formula", "source"][:columns]]
    order = {"gpu": 0, "host": 1, "nvme": 2}
    for line in sorted(plan.lines, key=lambda line: order[line.place]):
        row = [line.name, line.place, line.when, format_bytes(line.num_bytes), line.formula, line.source]
        rows.append(row[:columns])
    sizes = {moment: plan.total("gpu", moment) for moment in MOMENTS}
    largest = max(MOMENTS, key=lambda moment: sizes[moment])
    others = ", ".join(f"{moment} {format_bytes(size)}" for moment, size in sizes.items() if moment != largest)
    peak = f"peak per GPU: {format_bytes(sizes[largest])}, at {largest} ({MOMENTS[largest]}); {others}"
    hint = "" if has_formulas else "\n--lines prints the formula and the source of each line"
    return f"{_align(rows, range(3, 4))}\n{peak}{hint}"


def _align(rows: Sequence[Sequence[str]], sizes: range) -> str:
    """Return rows as aligned columns; `sizes`: columns of sizes, which stand on the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in sizes else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
