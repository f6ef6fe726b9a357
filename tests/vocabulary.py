"""Helpers that most tests share: recipes and rows in files, messages, and the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

RUN = "tests.resume.cases:run"
"""For Workers: train a recipe in the worker processes."""

COMPARED_METRICS = ("step", "samples", "epoch", "split", "loss", "accuracy", "margin", "lr", "grad_norm")
"""Metrics that two runs share to the bit: no clock and no memory."""


def write_recipe(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write recipe.yaml into the folder; return its path."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object per line, such as metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line; return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return a run's events of one name."""
    return [event for event in read_jsonl(run_dir / "events.jsonl") if event["event"] == name]


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl, reduced to the metrics that two equal runs share."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [{name: row[name] for name in COMPARED_METRICS if name in row} for row in rows]


def message(role: str, content: str) -> dict[str, str]:
    """Return a chat message."""
    return {"role": role, "content": content}


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value))."""
    return 1 / (1 + math.exp(-value))


def invoke(*words: Any) -> Result:
    """Run a command in this process; raise what it raised, but for its exit."""
    from dstrain.cli import main

    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_dstrain(*words: Any) -> str:
    """Run a command in a process without GPUs; return its standard output. It must end with code 0."""
    command = [sys.executable, "-m", "dstrain", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Return when it holds; fail after a time that it does not take on a busy machine either."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:g} s"
        time.sleep(0.02)


def find_processes(folder: Path) -> list[Any]:
    """Return the processes whose command line names the folder: what a launch left behind."""
    import psutil

    def words(process: Any) -> str:
        try:
            return " ".join(process.cmdline())
        except psutil.Error:
            return ""

    return [process for process in psutil.process_iter() if str(folder) in words(process)]
