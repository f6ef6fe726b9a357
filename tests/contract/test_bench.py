"""`dstrain bench` takes the recipe's steps, reports what they cost, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.bench import (
    WARMUP_STEPS,
    _StepRecord,
    compare_with_bound,
    compare_with_plan,
    show_bench,
    summarize,
)
from dstrain.planner.roofline import compute_cost
from dstrain.training.memory import MemoryForecast
from tests.tiny import tiny_recipe
from tests.unit.planner.recipes import made_config, made_plan
from tests.vocabulary import invoke, write_recipe

KEYS = {
    "task", "preset", "device", "precision", "processes", "batch", "parameters", "trained_parameters", "warmup_steps",
    "steps", "tokens_per_second", "samples_per_second", "step_seconds", "data_wait_share", "padding_share",
    "flops_per_step", "peak_flops", "mfu", "peak_memory_gib", "host_memory_gib", "process_memory_gib", "plan",
    "mean_pass", "roofline",
}  # fmt: skip


def written(folder: Path, **values: Any) -> str:
    (folder / "data").mkdir(exist_ok=True)
    return str(write_recipe(folder / "data", tiny_recipe("rm", folder / "data") | values))


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the command in a folder of its own, with one for temporary files inside."""
    (folder / "here" / "tmp").mkdir(parents=True)
    env = {**os.environ, "TMPDIR": str(folder / "here" / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch makes it, by default in TMPDIR
    return subprocess.Popen(
        [sys.executable, "-m", "dstrain", "bench", *words], env=env, cwd=folder / "here", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def left(folder: Path) -> list[Path]:
    return [path for path in (folder / "here").rglob("*") if path.name != "tmp"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_figures_are_of_all_processes_and_nothing_is_left(processes: int, tmp_path: Path) -> None:
    recipe = written(tmp_path, eval={"every": 1}, save={"every": 1}, batch={"total": 8, "micro": 2})
    words = ("--steps", "4", "--num-gpus", str(processes), "--json")
    said, errors = (child := start(tmp_path, recipe, *words)).communicate(timeout=280)
    assert child.returncode == 0, said + errors
    row = json.loads(said)
    assert set(row) == KEYS
    assert (row["processes"], row["steps"], row["warmup_steps"]) == (processes, 4, WARMUP_STEPS)
    assert (row["preset"], row["device"], row["precision"]) == ("zero2", "cpu", "fp32")
    assert row["plan"]["measured_gib"] > 0
    assert row["plan"]["predicted_gib"] > 0
    assert row["batch"] == {"total": 8, "micro": 2, "accumulate": 4 // processes}
    assert len(row["host_memory_gib"]) == processes
    assert row["mfu"] is None is row["peak_memory_gib"]
    times = row["step_seconds"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert row["samples_per_second"] == pytest.approx(8 / times["mean"])
    assert row["flops_per_step"] > 0
    assert row["roofline"]["flops_per_token"] > 0
    assert row["roofline"]["bytes_per_token"] > 0
    assert row["roofline"]["bound"] is None, "no peaks of a CPU are known"
    assert row["mean_pass"]["samples"] == 2
    assert row["padding_share"] == 0, "batches are packed"
    assert 0 <= row["data_wait_share"] < 1
    assert not left(tmp_path)


@pytest.mark.slow  # Ctrl-C: faults/test_kill
@pytest.mark.parametrize("processes", [1, 2])
def test_control_c_leaves_nothing_behind(processes: int, tmp_path: Path) -> None:
    child = start(tmp_path, written(tmp_path), "--steps", "100000", "--num-gpus", str(processes))
    try:
        deadline = time.monotonic() + 200
        while not list((tmp_path / "here" / "tmp").glob("dstrain-*/run/events.jsonl")):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode not in (0, None)
    assert not left(tmp_path)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--set", "optim.speed=1"), r"optim.speed"),
        (("--set", "batch={total: 2, micro: 4}"), r"batch.micro: is 4, above batch.total"),
        (("--ds-config", "zero9"), r"zero9"),
        (("--steps", "0"), r"--steps"),
    ],
)
def test_a_bad_request_exits_with_2(words: tuple[str, ...], why: str, tmp_path: Path) -> None:
    done = invoke("bench", written(tmp_path), *words)
    assert done.exit_code == 2
    assert why in done.stderr


def record(seconds: float, tokens: int = 10) -> _StepRecord:
    return _StepRecord(seconds=seconds, samples=2, tokens=tokens, positions=16, padding=16 - tokens)


def rank(seconds: list[float]) -> dict[str, Any]:
    return {
        "steps": [record(each) for each in seconds], "wait": 0.5, "flops": 3000, "counted_tokens": 30,
        "peak_memory_gib": 2.0, "host_memory_gib": 1.0, "process_memory_gib": 1.5,
    }  # fmt: skip


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    row = summarize([rank([1.0, 4.0]), rank([2.0, 3.0])], 100.0)
    assert row["step_seconds"]["mean"] == 3.0
    assert row["tokens_per_second"] == 40 / 6
    assert row["samples_per_second"] == 8 / 6
    assert row["data_wait_share"] == 0.5 / 6
    assert row["padding_share"] == 24 / 64
    assert row["flops_per_step"] == 100 * 40 / 2, "100 operations for each token, 20 tokens a step"
    assert row["mfu"] == pytest.approx(4000 / 6 / 200)
    assert row["peak_memory_gib"] == [2.0, 2.0]


def test_what_is_not_known_is_said_in_the_table() -> None:
    row = summarize([rank([1.0, 4.0]) | {"counted_tokens": 0, "peak_memory_gib": None}], None)
    about = {"task": "rm", "preset": "zero2", "precision": "bf16", "processes": 1, "device": "cpu", "parameters": 5}
    about |= {"trained_parameters": 5, "batch": {"total": 2, "micro": 2}, "warmup_steps": 3}
    lines = dict(line.split(maxsplit=1) for line in show_bench(about | row).splitlines())
    assert lines["MFU"] == "unknown"
    assert lines["plan"] == "no prediction, measured 1.5 GiB"
    assert show_bench(about | row | {"plan": {"predicted_gib": 1.25, "measured_gib": 1.5}}).endswith(
        "predicted 1.25 GiB, measured 1.5 GiB"
    )
    row = summarize([rank([1.0]) | {"process_memory_gib": None}], None)
    assert show_bench(about | row).endswith("no prediction, measured unknown")


def test_predicted_and_measured_memory_are_of_one_kind() -> None:
    gib = 2**30
    forecast = MemoryForecast(device_bytes=3 * gib, tensor_bytes=2 * gib, lines=(), fixes=())
    row = summarize([rank([1.0]), rank([1.0]) | {"peak_memory_gib": 2.5, "process_memory_gib": 3.5}], None)
    on_gpu = compare_with_plan(forecast, row)
    assert on_gpu == {
        "predicted_gib": 2.0, "measured_gib": 2.5, "predicted_total_gib": 3.0, "measured_total_gib": 3.5,
    }  # fmt: skip
    on_cpu = compare_with_plan(forecast, row | {"peak_memory_gib": None})
    assert on_cpu == {"predicted_gib": 3.0, "measured_gib": 3.5}


def test_the_share_of_the_bound_is_that_of_the_mean_pass() -> None:
    config = made_config(shape="llama-3.2-1b", data={"max_length": 2048}, batch={"total": 4, "micro": 4})
    inputs = made_plan("zero2", config, gpus=1).run
    mean_pass = {"tokens": 4096.0, "positions": 4096.0, "targets": 2048.0, "samples": 4.0}
    row = {"mean_pass": mean_pass, "device": "NVIDIA H100 80GB HBM3", "tokens_per_second": 40_000.0, "processes": 2}
    found = compare_with_bound(inputs, row)
    assert found is not None
    workload = replace(inputs.workload, tokens=4096, targets=2048)
    cost = compute_cost(replace(inputs, workload=workload))
    assert cost is not None
    assert found["flops_per_token"] == cost.flops_per_token
    assert found["bytes_per_token"] == cost.bytes_per_token
    assert found["share_of_bound"] == pytest.approx(20_000 / found["bound"]["tokens_per_second"])
    shared = compare_with_bound(inputs, row | {"mean_pass": mean_pass | {"tokens": 8192.0}})
    assert shared is not None
    assert shared["flops_per_token"] == found["flops_per_token"] / 2, "half of the tokens are those of a shared prompt"
    assert shared["share_of_bound"] == found["share_of_bound"] / 2
    assert compare_with_bound(inputs, row | {"device": "cpu"})["share_of_bound"] is None  # type: ignore[index]
    assert compare_with_bound(None, row) is None


def test_computed_figures_are_in_the_table() -> None:
    row = summarize([rank([1.0])], None)
    about = {"task": "rm", "preset": "zero2", "precision": "bf16", "processes": 1, "device": "cpu", "parameters": 5}
    about |= {"trained_parameters": 5, "batch": {"total": 2, "micro": 2}, "warmup_steps": 3, "plan": None}
    bound = {"tokens_per_second": 20_000.0, "by": "memory"}
    computed = {"kernels": "liger", "flops_per_token": 7.4e9, "recomputed_flops_per_token": 2e9, "bytes_per_token": 2e7}
    shown = show_bench(about | row | {"roofline": {**computed, "bound": bound, "share_of_bound": 0.5}})
    assert "7.4 G FLOPs and 2 G recomputed, 20 M bytes moved in memory (computed; kernels: liger)" in shown
    assert "20 k tokens/s of a process, by memory; 50 % of it reached" in shown
    lines = dict(line.split(maxsplit=1) for line in show_bench(about | row).splitlines())
    assert lines["bound"] == "unknown"
