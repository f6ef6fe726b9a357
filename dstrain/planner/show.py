"""Tables of memory plans for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dstrain.planner.fixes import Budget
from dstrain.planner.line import When
from dstrain.planner.memory import MemoryPlan
from dstrain.planner.read_shape import describe_counts
from dstrain.units import format_bytes, format_count

WHEN = {"always": "", "pass": "passes", "head": "head", "layer": "one layer", "step": "step"}


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
    return "\n".join([_align(rows, 1), *notes])


def _status(plan: MemoryPlan, budget: Budget, margin: float) -> str:
    gpu, host = budget.missing(plan)
    if host and not gpu:
        return f"no, host lacks {format_bytes(host)}"
    if gpu:
        return f"no, lacks {format_bytes(gpu)}"
    return "yes" if plan.gpu_bytes <= budget.gpu_bytes * (1 - margin) else "barely"


def show_lines(plan: MemoryPlan) -> str:
    """Return every line of a plan with its formula and source, and the peak that they make."""
    rows = [["what", "where", "when", "size", "formula", "source"]]
    order = {"gpu": 0, "host": 1, "nvme": 2}
    for line in sorted(plan.lines, key=lambda line: order[line.place]):
        rows.append([line.name, line.place, WHEN[line.when], format_bytes(line.num_bytes), line.formula, line.source])
    times: tuple[When, ...] = ("always", "pass", "head", "layer", "step")
    at = {name: format_bytes(plan.total("gpu", name)) for name in times}
    peak = (
        f"peak per GPU: {format_bytes(plan.gpu_bytes)} = {at['always']} always + the larger of {at['pass']} in passes "
        f"with the larger of {at['head']} in the head and {at['layer']} in one layer, and {at['step']} in the step"
    )
    return f"{_align(rows, 3)}\n{peak}"


def _align(rows: Sequence[Sequence[str]], first_number: int) -> str:
    """Return rows as aligned columns; a size stands on the right of its column."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if _is_size(index, first_number) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_size(index: int, first_number: int) -> bool:
    return first_number <= index <= (3 if first_number == 1 else first_number)
