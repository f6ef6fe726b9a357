"""Run folders written by tests: rows, events and configuration, without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from tests.vocabulary import write_jsonl

BEGIN = datetime(2026, 1, 31, 12, tzinfo=UTC)
RECIPE = {
    "task": "rm",
    "data": {"workers": 4},
    "optim": {"lr": 1e-3, "clip": 1.0},
    "eval": {"metric": "accuracy", "best": "max"},
}
ROW = {
    "step": 120,
    "samples": 7680,
    "epoch": 0.5,
    "split": "train",
    "loss": 0.69314,
    "accuracy": 0.5123,
    "lr": 9.9e-6,
    "grad_norm": 1.234,
    "tokens_per_second": 1234.4,
    "samples_per_second": 5.0,
    "step_seconds": 0.41,
    "peak_memory_gib": 3.0,
}
"""A row of training with every column that the console prints."""


def at(seconds: float) -> str:
    """Return the time of a row, `seconds` after the start of the run."""
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def train_row(step: int, **values: Any) -> dict[str, Any]:
    """Return a row of training: 2 s for each step."""
    row = {"time": at(2 * step), "step": step, "samples": 8 * step, "epoch": step / 100, "split": "train"}
    return {**row, "loss": math.exp(-step / 50), "lr": 1e-3, "grad_norm": 0.5, "step_seconds": 2.0} | values


def eval_row(step: int, **values: Any) -> dict[str, Any]:
    """Return a row of an evaluation."""
    row = {"time": at(2 * step + 1), "step": step, "samples": 8 * step, "epoch": step / 100, "split": "eval"}
    return {**row, "loss": 0.5} | values


def event(name: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
    """Return a row of events.jsonl."""
    return {"time": at(seconds), "event": name} | fields


def started(steps: int = 100, step: int = 0, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
    """Return the event of a start."""
    return event("started", seconds, step=step, steps=steps, world_size=2, preset="zero2") | fields


def write_run(
    run_dir: Path,
    rows: Sequence[Mapping[str, Any]] = (),
    events: Sequence[Mapping[str, Any]] = (),
    recipe: Mapping[str, Any] = RECIPE,
) -> Path:
    """Write a run folder; return it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_jsonl(run_dir / "metrics.jsonl", rows)
    write_jsonl(run_dir / "events.jsonl", events)
    (run_dir / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    (run_dir / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (run_dir / "environment.json").write_text(json.dumps({"host": "node1", "gpus": []}))
    return run_dir


def finished_run(run_dir: Path, **recipe: Any) -> Path:
    """Write a run of 100 steps that finished, with evaluations and checkpoints."""
    rows = [train_row(step, accuracy=0.5 + step / 400, data_wait_seconds=0.1) for step in range(5, 101, 5)]
    rows += [eval_row(step, loss=1 - step / 200, accuracy=0.5 + step / 500) for step in range(20, 101, 20)]
    saved = [event("saved", 2 * step, step=step, checkpoint=f"step-{step:08d}") for step in range(20, 101, 20)]
    rows.sort(key=lambda row: row["time"])
    return write_run(run_dir, rows, [started(), *saved, event("finished", 202, step=100)], RECIPE | recipe)
