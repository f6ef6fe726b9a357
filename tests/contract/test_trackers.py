"""Weights & Biases and TensorBoard hold what metrics.jsonl holds, over whole runs that are stopped, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import tiny_recipe
from tests.unit.report.wandb_files import files, only, rows
from tests.vocabulary import read_jsonl, write_recipe
from tests.workers import Workers

KEY = "fedcba9876543210" * 3


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The tiny reward model with both trackers on."""
    values = tiny_recipe("rm", tmp_path) | {"steps": 60, "save": {"every": 4}, "eval": {"every": 5}}
    values["log"] = {"every": 1, "tensorboard": True, "wandb": {"project": "p", "mode": "offline"}}
    write_recipe(tmp_path, values)
    return tmp_path / "recipe.yaml"


def start(recipe: Path, *sets: str, **environment: str) -> subprocess.Popen[str]:
    """`dstrain train` with two processes, into the folder `run` beside the recipe."""
    run_dir = str(recipe.parent / "run")
    command = [sys.executable, "-m", "dstrain", "train", str(recipe), "--num-gpus", "2", "--run-dir", run_dir]
    chosen = [word for pair in sets for word in ("--set", pair)]
    env = {**os.environ, **environment}
    return subprocess.Popen([*command, *chosen], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def told(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / "metrics.jsonl")


def wait_for_step(run_dir: Path, step: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if (run_dir / "metrics.jsonl").is_file() and any(row["step"] >= step for row in told(run_dir)):
            return
        time.sleep(0.01)
    raise AssertionError(f"{run_dir} never came to step {step}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_stopped_and_resumed_run_is_one_run_with_every_row(recipe: Path) -> None:
    pytest.importorskip("wandb")
    run_dir = recipe.parent / "run"
    stopped = start(recipe, WANDB_API_KEY=KEY)
    wait_for_step(run_dir, 7)
    workers = family(stopped)
    assert "wandb-core" in {process.name() for process in workers}
    os.kill(stopped.pid, signal.SIGTERM)
    output, _ = stopped.communicate(timeout=90)
    assert stopped.returncode == 75, output[-3000:]
    assert alive(workers) == []
    again = start(recipe, WANDB_API_KEY=KEY)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output[-3000:]

    first, second = files(run_dir)
    assert f"wandb sync {second.parent}" in output
    assert {only(path, "run").run_id for path in (first, second)} == {(run_dir / "wandb" / "id").read_text().strip()}
    assert [only(path, "exit").exit_code for path in (first, second)] == [75, 0]
    sent = [
        {name.removeprefix(f"{split}/"): value for name, value in row.items() if not name.startswith("_")} | {"split": split}
        for row in (*rows(first), *rows(second))
        for split in ["eval" if "eval/loss" in row else "train"]
    ]  # fmt: skip
    written = [{name: value for name, value in row.items() if name != "time"} for row in told(run_dir)]
    assert [row["split"] for row in written].count("eval") >= 12
    assert sent == written, "every row once, every number of it"
    secret = [path for path in run_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert secret == []


@pytest.mark.slow
def test_a_killed_worker_takes_every_process_with_it(recipe: Path) -> None:
    pytest.importorskip("wandb")
    run = start(recipe)
    wait_for_step(recipe.parent / "run", 3)
    children = family(run)
    services = [process for process in children if process.name().startswith("wandb-")]
    assert services
    rank_0 = services[0].parent()
    assert rank_0 is not None
    rank_0.kill()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1, output[-3000:]
    assert alive(children) == []


@pytest.mark.slow
def test_online_without_a_key_is_refused_before_anything_starts(recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    nowhere = {"HOME": str(tmp_path), "NETRC": str(tmp_path / ".netrc"), "WANDB_MODE": "", "WANDB_API_KEY": ""}
    run = start(recipe, "log.wandb.mode=online", **nowhere)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 2, output[-3000:]
    assert "log.wandb.mode is online, but there is no API key; set WANDB_API_KEY, run `wandb login`, or set" in output
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_tensorboard_shows_each_step_once_after_a_crash(recipe: Path, tmp_path: Path, two: Workers) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sets = ["log.wandb=null", "steps=9"]
    for crash_at in (3, 7, None):  # before the first checkpoint, and after it
        two("tests.resume.cases:run", recipe=str(recipe), run_dir=str(tmp_path / "run"), sets=sets, crash_at=crash_at)
    shown = reading.EventAccumulator(str(tmp_path / "run"))
    shown.Reload()
    for split in ("train", "eval"):
        written = [row for row in told(tmp_path / "run") if row["split"] == split]
        names = {name for row in written for name, value in row.items() if type(value) in (int, float)}
        assert {"loss", "accuracy", "margin", "samples_per_second"} <= names
        for name in names - {"step", "samples"}:
            seen = [(event.step, event.value) for event in shown.Scalars(f"{split}/{name}")]
            rows_with_it = [row for row in written if row.get(name) is not None]
            assert seen == [(row["step"], pytest.approx(row[name])) for row in rows_with_it], f"{name}: each step once"
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in shown.Tensors("recipe/text_summary")]
    assert {step for step, _ in texts} == {0, 4}, "as it began, and as it was resumed"
    assert "task: rm" in texts[0][1]


SINK = """
import json

class Lines:
    def __init__(self, run_dir, recipe):
        self.file = open(run_dir / "lines.jsonl", "a")
        self.put("init", recipe["task"])

    def put(self, *call):
        print(json.dumps(call), file=self.file, flush=True)

    def write(self, row):
        self.put("write", row)
        if row["step"] == 3:
            raise ValueError("full")

    def log_event(self, event):
        self.put("event", event["event"])

    def close(self, exit_code=0):
        self.put("close", exit_code)
"""


def test_a_sink_of_ones_own_gets_rows_and_events_and_its_fault_stops_nothing(
    recipe: Path, tmp_path: Path, two: Workers
) -> None:
    (tmp_path / "own_sinks.py").write_text(SINK)
    sets = ["log={every: 1, tensorboard: false, sinks: [own_sinks.Lines]}"]
    for steps in (2, 5):
        more = [*sets, f"steps={steps}"]
        two("tests.resume.cases:run", recipe=str(recipe), run_dir=str(tmp_path / "run"), sets=more, allowed=["steps"])
    calls = read_jsonl(tmp_path / "run" / "lines.jsonl")
    first, second = calls[: calls.index(["init", "rm"], 1)], calls[calls.index(["init", "rm"], 1) :]
    assert first[0] == ["init", "rm"]
    assert ["event", "started"] in first
    written = [{key: value for key, value in row.items() if key != "time"} for row in told(tmp_path / "run")]
    taken = [call[1] for call in (*first, *second) if call[0] == "write"]
    assert taken == written[: len(taken)], "each row once, by rank 0 alone"
    assert [row["step"] for row in taken] == [1, 2, 2, 3], "with the evaluation, and up to the row that it fails at"
    assert [row["step"] for row in written if row["split"] == "train"] == [1, 2, 3, 4, 5]
