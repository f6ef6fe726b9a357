"""Charts of the report page: which columns each one shows, as the values that the page's script draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dstrain.report.run_history import MetricColumns, RunHistory, is_number
from dstrain.report.run_log import task_metric_names

GIB = 2**30
MAX_BUCKETS, MIN_BUCKETS = 400, 60
"""Buckets of a curve on the page of one run, and of very many."""
MAX_TASK_METRICS = 24
"""Limit of task metrics on the page, in the order of the file."""
AXIS_POINTS = 300
"""Points of the tables that turn a step into an epoch and a time."""
MAX_MARKS = 300
"""Limit of marks of one kind and run."""
MARKS = {
    "started": "start",
    "resumed": "start",
    "resharded": "start",
    "micro_batch_reduced": "memory",
    "out_of_memory": "memory",
    "step_skipped": "skip",
    "loss_scale_lowered": "skip",
    "saved": "save",
    "stopping": "stop",
    "stopped": "stop",
    "failed": "stop",
    "stalled": "stop",
}
"""Event -> kind of its mark in the charts."""


@dataclass(frozen=True)
class Curve:
    """A column of a split in a chart."""

    column: str
    label: str
    split: str = "train"
    scale: float = 1.0


@dataclass(frozen=True)
class Chart:
    """A chart: curves that share a unit."""

    id: str
    title: str
    unit: str
    about: str
    curves: tuple[Curve, ...]
    is_log: bool = False
    from_zero: bool = False
    is_dotted: bool = False
    """Points instead of a line: the values are of single moments."""


def _both_splits(column: str) -> tuple[Curve, ...]:
    return Curve(column, "train"), Curve(column, "eval", "eval")


def _one(column: str, label: str) -> tuple[Curve, ...]:
    return (Curve(column, label),)


LOSS = Chart("loss", "Loss", "", "mean per row", _both_splits("loss"))
STEP_CURVES = Curve("step_seconds", "step"), Curve("data_wait_seconds", "waiting for data")
SAVE_CURVES = Curve("save_stall_seconds", "training waited"), Curve("save_seconds", "until complete")
DEVICE_CURVES = (
    Curve("allocated_memory_gib", "tensors now"),
    Curve("peak_memory_gib", "tensors, peak"),
    Curve("reserved_memory_gib", "reserved by torch"),
)
HOST_CURVES = (
    Curve("resident_memory_gib", "resident now"),
    Curve("host_memory_gib", "resident, peak"),
    Curve("pinned_memory_gib", "pinned"),
)
# fmt: off
RATES = (
    Chart("lr", "Learning rate", "", "of the last step of a row", _one("lr", "lr"), from_zero=True),
    Chart("grad_norm", "Gradient norm", "", "before clipping", _one("grad_norm", "gradient norm"), is_log=True),
    Chart("tokens", "Throughput", "tokens/s", "all processes", _one("tokens_per_second", "tokens/s"), from_zero=True),
    Chart("samples", "Throughput", "samples/s", "all processes", _one("samples_per_second", "samples/s"), from_zero=True),
    Chart("step_time", "Time of a step", "s", "waiting for data included", STEP_CURVES, from_zero=True),
    Chart("saves", "Checkpoint time", "s", "per row", SAVE_CURVES, from_zero=True, is_dotted=True),
    Chart("device_memory", "Device memory", "GiB", "of the process with most", DEVICE_CURVES, from_zero=True),
    Chart("host_memory", "Host memory", "GiB", "of the process with most", HOST_CURVES, from_zero=True),
    Chart("available", "Host memory left", "GiB", "of the host with least", _one("available_memory_gib", "available"), from_zero=True),
    Chart("gpu", "GPU utilization", "%", "mean over processes", _one("gpu_utilization", "busy"), from_zero=True),
    Chart("padding", "Padding", "%", "of the computed tokens", (Curve("padding", "padding", scale=100.0),), from_zero=True),
)
# fmt: on


def build_charts(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """Return the charts that have values, as JSON for the page's script."""
    names = task_metric_names({name: 0 for run in runs for split in (run.train, run.eval) for name in split.columns})
    metrics = [
        Chart(f"metric-{index}", name, "", "task metric", _both_splits(name))
        for index, name in enumerate(names[:MAX_TASK_METRICS])
    ]
    buckets = max(MIN_BUCKETS, min(MAX_BUCKETS, 3 * MAX_BUCKETS // len(runs)))
    found = (_build_chart(chart, runs, buckets) for chart in (LOSS, *metrics, *RATES))
    shown = [chart for chart in found if chart["series"]]
    return [chart for chart in shown if chart["id"] != "padding" or any(any(one["y"]) for one in chart["series"])]


def _build_chart(chart: Chart, runs: Sequence[RunHistory], buckets: int) -> dict[str, Any]:
    series = []
    for number, run in enumerate(runs):
        for slot, curve in enumerate(chart.curves):
            split = run.train if curve.split == "train" else run.eval
            if curve.column in split.columns:
                points = _build_points(split, curve, buckets)
                name = {"run": number, "slot": slot, "label": curve.label, "split": curve.split}
                series += [name | points] * (len(points["x"]) > 0)
    lines = [line for number, run in enumerate(runs) for line in _reference_lines(chart, number, run)] if series else []
    return {
        "id": chart.id, "title": chart.title, "unit": chart.unit, "about": chart.about, "log": chart.is_log,
        "zero": chart.from_zero, "dots": chart.is_dotted, "series": series, "lines": lines,
    }  # fmt: skip


def _build_points(split: MetricColumns, curve: Curve, buckets: int) -> dict[str, list[float | int]]:
    """Return the points of a curve; of one with many, the extremes of each bucket, and their means."""
    steps, values = split.columns["step"], split.columns[curve.column]
    x, y = downsample(steps, values, buckets)
    points = {"x": round_values(x), "y": round_values(y * curve.scale)}
    mean_x, mean_y = bucket_means(steps, values, buckets)
    if len(mean_x):
        points |= {"mean_x": round_values(mean_x), "mean_y": round_values(mean_y * curve.scale)}
    return points


def _reference_lines(chart: Chart, number: int, run: RunHistory) -> Iterator[dict[str, Any]]:
    """Yield horizontal lines: predicted memory, and the norm at which gradients are clipped."""
    on_gpu = "allocated_memory_gib" in run.train.columns
    forecasts = run.find_events("memory")
    if chart.id in ("device_memory", "host_memory") and forecasts:
        is_device = chart.id == "device_memory"
        name = "predicted_bytes" if is_device == on_gpu else "predicted_host_bytes"
        if is_number(value := forecasts[-1].get(name)) and value > 0:
            yield {"run": number, "label": "predicted", "y": round(value / GIB, 3)}
    if chart.id == "grad_norm" and is_number(clip := run.get_setting("optim.clip")) and clip > 0:
        yield {"run": number, "label": "optim.clip", "y": clip}


def build_axes(run: RunHistory) -> dict[str, list[float | int]]:
    """Return tables of steps with their epoch and their hours since the start, for other x axes."""
    columns: list[MetricColumns] = [run.train, run.eval]
    steps, epochs, times = (
        np.concatenate([np.array(split.columns[name]) for split in columns]) for name in ("step", "epoch", "time")
    )
    keep = np.isfinite(steps) & np.isfinite(epochs) & np.isfinite(times)
    order = np.lexsort((times[keep], steps[keep]))
    steps, epochs, times = steps[keep][order], epochs[keep][order], times[keep][order]
    if len(steps) > AXIS_POINTS:
        chosen = np.linspace(0, len(steps) - 1, AXIS_POINTS).astype(int)
        steps, epochs, times = steps[chosen], epochs[chosen], times[chosen]
    begin = float(times[0]) if len(times) else math.nan
    return {
        "step": round_values(steps),
        "epoch": round_values(epochs),
        "hours": round_values((np.maximum.accumulate(times) - begin) / 3600 if len(times) else times),
    }


def build_marks(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """Return the events that the charts mark at their steps."""
    marks: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        counts: dict[str, int] = {}
        for event in run.events:
            kind = MARKS.get(event["event"])
            if kind is None or not is_number(event.get("step")):
                continue
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] <= MAX_MARKS:
                marks.append({"run": number, "step": event["step"], "kind": kind, "text": event["event"]})
    return marks


def downsample(x: ArrayLike, y: ArrayLike, num_buckets: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points with the lowest and highest y of each bucket, the first and the last; without those of NaN.

    `x` and `y` have shape (N,). The result has at most 2 * num_buckets + 2 points in order of x, and all of them if
    there are no more. A spike of one step stays visible, which a mean or every n-th point would hide.
    """
    steps, values = _sort_finite(x, y)
    if len(steps) <= 2 * num_buckets + 2:
        return steps, values
    chosen = {0, len(steps) - 1}
    for begin, end in pairwise(np.linspace(0, len(steps), num_buckets + 1).astype(int)):
        chosen |= {int(begin + np.argmin(values[begin:end])), int(begin + np.argmax(values[begin:end]))}
    indices = sorted(chosen)
    return steps[indices], values[indices]


def bucket_means(x: ArrayLike, y: ArrayLike, num_buckets: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean x and y of each bucket; nothing where `downsample` returns all points."""
    steps, values = _sort_finite(x, y)
    if len(steps) <= 2 * num_buckets + 2:
        return steps[:0], values[:0]
    edges = np.linspace(0, len(steps), num_buckets + 1).astype(int)
    counts = np.diff(edges)
    return np.add.reduceat(steps, edges[:-1]) / counts, np.add.reduceat(values, edges[:-1]) / counts


def _sort_finite(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    finite = np.isfinite(steps) & np.isfinite(values)
    steps, values = steps[finite], values[finite]
    order = np.argsort(steps, kind="stable")  # damaged files may repeat steps
    return steps[order], values[order]


def round_values(values: Sequence[float] | NDArray[np.float64], digits: int = 6) -> list[float | int]:
    """Return the values with this many significant digits, whole numbers as int: a page is mostly numbers."""
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]
