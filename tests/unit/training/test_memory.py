"""Errors of failed allocations: where, what, memory by line, fixes in order; and the forecast beside it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.config import RunConfig, resolve_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import OutOfMemoryError, RunError
from dstrain.planner.choose import Fix
from dstrain.planner.workload import Cluster
from dstrain.preset import read_preset
from dstrain.report.allocation_errors import AllocationFailure
from dstrain.report.memory import PeakBytes
from dstrain.report.run_log import RunLog
from dstrain.training.list_parameters import list_base_parameters
from dstrain.training.memory import (
    MemoryForecast,
    MemoryMonitor,
    describe_forecast,
    describe_measured,
    find_missing_bytes,
    find_most,
    make_forecast,
    order_fixes,
)
from tests.tiny import tiny_recipe
from tests.vocabulary import read_events

FORECAST = MemoryForecast(
    device_bytes=12 * 2**30,
    tensor_bytes=11 * 2**30,
    lines=(("weights", "gpu", 2**30), ("activations", "gpu", 11 * 2**30), ("batches", "host", 2**20)),
    fixes=(Fix({"batch.micro": 4}, 5632 * 2**20, {"batch.micro": 8}),),
)


def monitor(run_dir: Path, **sections: Any) -> MemoryMonitor:
    values = {
        "task": "rm",
        "model": {"path": "x"},
        "data": {"train": "y"},
        "steps": 4,
        "batch": {"total": 16, "micro": 8},
    }
    config = RunConfig.model_validate(values | sections)
    return MemoryMonitor(
        config=config, batch=resolve_batch(config.batch, 1), preset=read_preset("zero2"), cluster=Cluster(kind="cpu"),
        world=SingleProcessWorld(), run_dir=run_dir,
    )  # fmt: skip


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner returns FORECAST."""
    monkeypatch.setattr("dstrain.training.memory.make_forecast", lambda *_: FORECAST)


def fail(watch: MemoryMonitor, phase: str, activity: str, step: int | None = 3) -> OutOfMemoryError:
    """Run out of memory in a phase; return the error for the user."""
    watch.world.log.record_progress(phase, step)
    watch.world.log.activity = activity
    with pytest.raises(OutOfMemoryError) as caught, watch.explain():
        torch.empty(2**50, dtype=torch.uint8)
    return caught.value


def test_the_message_has_place_request_memory_and_fixes_in_order(tmp_path: Path) -> None:
    error = fail(monitor(tmp_path), "step 3", "the backward pass of micro-batch 2 of 2 (8 samples, 90 tokens)")
    lines = str(error).splitlines()
    assert lines[0].startswith("out of memory: rank 0 on ")
    assert lines[0].endswith(
        ", step 3, the backward pass of micro-batch 2 of 2 (8 samples, 90 tokens): could not allocate 1024.0 TiB of host memory"
    )
    assert lines[1].startswith("  DefaultCPUAllocator: can't allocate memory")
    assert any(line.startswith("  measured: process ") for line in lines)
    fixes = [line.split(". ", 1)[1] for line in lines if line[2:3].isdigit()]
    assert fixes == [
        "batch.micro 8 -> 4",
        "ds_config zero2 -> zero3",
        "ds_config zero2 -> zero3_partial_offload",
        "ds_config zero2 -> zero2_offload",
        "ds_config zero2 -> zero3_offload",
        "ds_config zero2 -> zero3_nvme",
        "model.lora none -> {rank: 16} (changes what is learnt)",
        "data.max_length 1024 -> 512 (changes what is learnt)",
        "batch.on_oom stop -> shrink finds the largest micro-batch that fits before the first step",
    ]
    assert lines[-1].startswith("fix the cause and start again")
    (event,) = read_events(tmp_path, "out_of_memory")
    assert (event["rank"], event["step"], event["requested_bytes"]) == (0, 3, 2**50)
    assert "torch.empty" in (tmp_path / "logs/stacks/rank-00000.txt").read_text()


@pytest.mark.usefixtures("planned")
def test_the_plan_gives_the_lines_and_the_fixes_where_there_is_one(tmp_path: Path) -> None:
    text = str(fail(monitor(tmp_path), "step 3", "the forward pass"))
    assert "planned      12.0 GiB in all\n    weights      1.0 GiB\n    activations  11.0 GiB\n  measured" in text
    assert "batches" not in text, "that is host memory"
    assert "  1. batch.micro 8 -> 4 saves 5.5 GiB\n  2. batch.on_oom stop -> shrink " in text


def test_host_memory_beside_a_gpu_has_other_fixes(tmp_path: Path) -> None:
    watch = monitor(tmp_path, batch={"total": 16, "micro": 8, "on_oom": "shrink"})
    watch.world.device = torch.device("cuda", 0)
    error = fail(watch, "step 3", "the forward pass")
    assert "1. data.workers: below 4" in str(error)
    assert "batch.micro" not in str(error), "a smaller micro-batch would not help"


MIB = 2**20
MICRO, CHECKPOINTING, ZERO3 = (
    Fix({"batch.micro": 1}, 155 * 2**10, {"batch.micro": 2}),
    Fix({"model.gradient_checkpointing": True}, 40 * MIB, {}),
    Fix({"ds_config": "zero3"}, 300 * MIB, {"ds_config": "zero2"}),
)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (None, [MICRO, CHECKPOINTING, ZERO3]),
        (100 * 2**10, [MICRO, CHECKPOINTING, ZERO3]),
        (30 * MIB, [CHECKPOINTING, ZERO3]),
        (96 * MIB, [ZERO3, CHECKPOINTING]),
        (1200 * MIB, [ZERO3]),
        (2000 * MIB, [ZERO3, CHECKPOINTING, MICRO]),  # nothing helps much
    ],
)
def test_fixes_that_save_what_is_missing_come_first_and_small_ones_are_left_out(
    missing: int | None, named: list[Fix]
) -> None:
    assert order_fixes([MICRO, CHECKPOINTING, ZERO3], missing) == named


def test_what_is_missing_is_the_request_without_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    failure, gpu = AllocationFailure("gpu", 96 * MIB, ""), torch.device("cuda", 0)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (36 * MIB, 2**32))
    assert find_missing_bytes(failure, gpu) == 60 * MIB
    assert find_missing_bytes(AllocationFailure("gpu", None, ""), gpu) is None
    assert find_missing_bytes(AllocationFailure("host", 96 * MIB, ""), gpu) is None

    def fail(device: torch.device) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr("torch.cuda.mem_get_info", fail)
    assert find_missing_bytes(failure, gpu) is None


def test_errors_that_are_not_of_memory_pass(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="another"), monitor(tmp_path).explain():
        raise RunError("another")


def test_measured_memory_is_reported_once_and_on_a_cpu_nothing_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.training.memory.plan_memory", lambda *_: pytest.fail("the planner ran"))
    watch, run_log = monitor(tmp_path), RunLog(tmp_path)
    for steps in (1, 2, 3):
        watch.compare_with_forecast(steps, run_log)
    watch.finish_comparison(run_log)
    printed = capsys.readouterr().out
    assert printed.startswith("memory: measured ")
    assert len(printed.splitlines()) == 1
    (event,) = read_events(tmp_path, "memory")
    assert event["measured_bytes"] > 2**20
    assert not [name for name in event if name.startswith("predicted")]
    peak = PeakBytes(2**29, 2**30)
    assert describe_forecast(None, peak) == "memory: tensors measured 512.0 MiB; GPU measured 1.0 GiB"
    assert describe_forecast(FORECAST, peak) == (
        "memory: tensors predicted 11.0 GiB, measured 512.0 MiB; GPU predicted 12.0 GiB, measured 1.0 GiB"
    )
    assert describe_measured(PeakBytes(None, 2**30)) == "memory: measured 1.0 GiB"
    assert describe_measured(PeakBytes(None, None)) == "memory: measured unknown"


def test_on_a_gpu_tensors_are_compared_with_tensors_and_all_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: None
) -> None:
    monkeypatch.setattr("dstrain.training.memory.measure_peak", lambda device: PeakBytes(3 * 2**30, 5 * 2**30))
    watch, run_log = monitor(tmp_path), RunLog(tmp_path)
    watch.world.device = torch.device("cuda", 0)
    watch.compare_with_forecast(2, run_log)
    watch.finish_comparison(run_log)
    watch.finish_comparison(run_log)
    (event,) = read_events(tmp_path, "memory")
    assert (event["predicted_bytes"], event["measured_bytes"]) == (11 * 2**30, 3 * 2**30)
    assert (event["predicted_total_bytes"], event["measured_total_bytes"]) == (12 * 2**30, 5 * 2**30)
    assert event["predicted_host_bytes"] == 2**20


def test_the_most_of_all_ranks_is_reported() -> None:
    assert find_most([PeakBytes(1, 9), PeakBytes(4, None), PeakBytes(None, 2)]) == PeakBytes(4, 9)
    assert find_most([PeakBytes(None, None)]) == PeakBytes(None, None)


def test_the_planner_is_asked_for_lines_and_fixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [SimpleNamespace(name=name, place=place, num_bytes=size) for name, place, size in FORECAST.lines]
    plan = SimpleNamespace(
        gpu_bytes=12 * 2**30, tensor_bytes=11 * 2**30, lines=lines, run=None
    )  # fmt: skip
    monkeypatch.setattr("dstrain.training.memory.read_shape", lambda *_: None)
    monkeypatch.setattr("dstrain.training.memory.plan_memory", lambda *_: plan)
    monkeypatch.setattr("dstrain.training.memory.suggest_fixes", lambda *_, **__: [*FORECAST.fixes])
    watch = monitor(tmp_path)
    assert make_forecast(watch.config, watch.preset, Cluster()) == FORECAST


@pytest.mark.slow
def test_a_planner_that_fails_stops_nothing(tmp_path: Path) -> None:
    watch = monitor(tmp_path)  # its model does not exist
    assert make_forecast(watch.config, watch.preset, Cluster()) is None


def test_an_error_of_another_family_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process is started"))
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 320, "n_positions": 64}
    config = RunConfig.model_validate(tiny_recipe("sft", tmp_path) | {"model": {"config": gpt2, "tokenizer": None}})
    found = make_forecast(config, read_preset("zero2"), Cluster(kind="cpu"), list_base_parameters)
    assert found is not None
    assert found.device_bytes > 2**20


def test_a_run_from_a_config_has_a_forecast(tmp_path: Path) -> None:
    config = RunConfig.model_validate(tiny_recipe("sft", tmp_path))
    found = make_forecast(config, read_preset("zero2"), Cluster(kind="cpu"))
    assert found is not None
    assert found.device_bytes > 2**20
    assert any(name.startswith("gradients") for name, _, _ in found.lines)
