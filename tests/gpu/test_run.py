"""Whole runs on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import SHAPES
from tests.gpu.workers import IS_SLOW, REHEARSAL, GpuWorkers
from tests.tiny import tiny_recipe
from tests.vocabulary import metric_rows, read_events, read_jsonl, write_recipe

pytestmark = pytest.mark.gpu

RUN = "tests.gpu.cases:run"


def written(folder: Path, **changes: Any) -> str:
    """The tiny reward model's recipe with these changes, as a file."""
    values = tiny_recipe("rm", folder)
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    write_recipe(folder, values)
    return str(folder / "recipe.yaml")


@pytest.mark.parametrize("workers", [0, 4])
def test_batches_come_in_pinned_memory_and_arrive_whole(workers: int, gpus: GpuWorkers) -> None:
    for told in gpus("tests.gpu.cases:pinned", workers=workers):
        assert told["same"]
        assert all(told["same"])
        assert all(told["pinned"]) != REHEARSAL


@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        ("zero0", "bf16"),
        ("zero1", "bf16"),
        ("zero2", "bf16"),
        ("zero3", "bf16"),
        ("zero2", "fp32"),
        ("zero2_offload", "bf16"),
    ],
)
def test_a_deterministic_run_resumes_bit_for_bit(preset: str, precision: str, gpus: GpuWorkers, tmp_path: Path) -> None:
    recipe = written(tmp_path, deterministic=True, options={"disable_dropout": False}, steps=14, batch={"total": 6, "micro": 2},
                     save={"every": 4, "keep": 9}, eval={"every": 8}, model={"gradient_checkpointing": True})  # fmt: skip
    sets = [f"ds_config={preset}", f"precision={precision}", "model.config.attention_dropout=0.1"]
    whole = gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets, crash_at=7)
    rest = gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets)
    assert all(result["code"] == 0 for result in (*whole, *rest))
    assert [event["step"] for event in read_events(tmp_path / "broken", "resumed")] == [4]
    assert metric_rows(tmp_path / "broken") == metric_rows(tmp_path / "whole"), "bit for bit"


def test_a_run_tells_what_the_device_holds(gpus: GpuWorkers, only_gpu: None, tmp_path: Path) -> None:
    gpus(RUN, recipe=written(tmp_path), run_dir=str(tmp_path / "run"), sets=["steps=3"])
    told = read_jsonl(tmp_path / "run/metrics.jsonl")
    train = [row for row in told if row["split"] == "train"]
    assert all(0 < row["peak_memory_gib"] < 10 for row in train)
    assert all(row["tokens_per_second"] > 0 for row in train)


def test_a_reward_model_of_100_million_parameters_learns(gpus: GpuWorkers, tmp_path: Path) -> None:
    """Made-up pairs whose better answer is the polite one; a CPU rehearses it with the tiny model."""
    shape = "tiny" if IS_SLOW else "100m"
    steps, lr = (60, 3e-3) if IS_SLOW else (60, 1e-4)
    recipe = written(
        tmp_path, steps=steps, optim={"lr": lr}, batch={"total": 8, "micro": 4},
        model={"config": {"model_type": "llama", **SHAPES[shape]}, "tokenizer": {"train": "bpe", "vocab_size": 320}},
        log={"every": 10, "tensorboard": False}, eval={"every": 30, "metric": "accuracy", "best": "max"},
    )  # fmt: skip
    result = gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "run"))
    assert [each["code"] for each in result] == [0] * len(result)
    told = read_jsonl(tmp_path / "run/metrics.jsonl")
    train, test = ([row for row in told if row["split"] == split] for split in ("train", "eval"))
    assert train[-1]["loss"] < 0.5 * train[0]["loss"]
    assert test[-1]["accuracy"] >= 0.9
    assert (tmp_path / "run/checkpoints/best").exists()
    wanted = None if IS_SLOW else 100e6
    made = read_events(tmp_path / "run", "model")[0]["parameters"]
    assert wanted is None or made > wanted
