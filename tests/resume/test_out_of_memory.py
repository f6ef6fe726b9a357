"""A run that runs out of memory goes on with half the micro-batch: its weights are those of a run with that size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dstrain.tasks import find_task
from tests.cells import SLOW
from tests.vocabulary import RUN, metric_rows, read_events, write_recipe
from tests.workers import WorkerError, Workers

SHRINK = ["batch.on_oom=shrink"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny reward model without dropout, after plain SGD, 6 samples per step in passes of 2."""
    folder = tmp_path_factory.mktemp("recipe")
    values = find_task("rm").tiny(folder)
    values |= {
        "optim": {"name": "sgd", "lr": 1.0, "clip": 0.05},
        "steps": 6,
        "batch": {"total": 6, "micro": 2},
        "save": {"every": 2, "keep": 9},
        "eval": {"every": 6},
    }
    return str(write_recipe(folder, values))


def reference(recipe: str, folder: Path, workers: Workers, sets: list[str], until: int = 2) -> Path:
    """A run whose micro-batch is 2 up to a step, and 1 from there on, without any failure."""
    broken = workers(RUN, recipe=recipe, run_dir=str(folder), sets=[*sets, f"save.every={until}"], crash_at=until + 1)
    assert broken[0]["crashed"]
    workers(RUN, recipe=recipe, run_dir=str(folder), sets=[*sets, "batch.micro=1", f"save.every={until}"])
    return folder


def state(run_dir: Path, step: int = 6) -> dict[str, np.ndarray]:
    """Weights and optimizer state of a checkpoint, of all ranks."""
    files = sorted((run_dir / f"checkpoints/step-{step:08d}/state").glob("*.safetensors"))
    assert files
    return {f"{file.name} {name}": array for file in files for name, array in load_file(file).items()}


def distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    assert found.keys() == wanted.keys()
    square = lambda arrays: sum(float((array.astype(np.float64) ** 2).sum()) for array in arrays)  # noqa: E731
    return float(
        np.sqrt(square(found[name] - wanted[name].astype(np.float64) for name in wanted) / square(wanted.values()))
    )


def ids_by_step(results: list[dict[str, Any]], skipped: int | None = None) -> list[list[int]]:
    """Sample ids of each step over all ranks."""
    steps = zip(*(result["samples"] for result in results), strict=True)
    return [
        sorted(sample for of_rank in step for sample in of_rank)
        for number, step in enumerate(steps)
        if number != skipped
    ]


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("zero0", []),
        SLOW("zero1", []),  # stages 1 and 2 are one class of DeepSpeed
        ("zero2", []),
        SLOW("zero2_offload", ["optim={name: adamw, lr: 0.001}"]),
        SLOW("zero1", ["precision=bf16", "optim={name: adamw, lr: 0.001}"]),
        SLOW("zero2", ["precision=bf16", "batch.total=4"]),  # a single pass for each process before, two after
    ],
)
def test_a_forward_pass_without_memory_halves_the_micro_batch_in_place(
    preset: str, more: list[str], recipe: str, tmp_path: Path, two: Workers
) -> None:
    sets = [f"ds_config={preset}", *more, *SHRINK]
    wanted = reference(recipe, tmp_path / "reference", two, sets)
    whole = two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    told = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, limit={"samples": 1, "from_step": 3})
    assert [result["code"] for result in told] == [0, 0]
    assert distance(state(tmp_path / "run"), state(wanted)) <= 1e-6
    assert ids_by_step(told, skipped=2) == ids_by_step(whole), "step 3 was tried twice"
    (event,) = read_events(tmp_path / "run", "micro_batch_reduced")
    assert (event["step"], event["change"], event["ranks"]) == (2, "batch.micro 2 -> 1", [1])
    assert not read_events(tmp_path / "run", "step_skipped")
    rows = metric_rows(tmp_path / "run")
    assert [row["step"] for row in rows if row["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses == pytest.approx([row["loss"] for row in metric_rows(wanted) if row["split"] == "train"], rel=1e-6)


def test_a_resumed_run_starts_with_the_smaller_micro_batch(recipe: str, tmp_path: Path, two: Workers) -> None:
    run, limit = tmp_path / "run", {"samples": 1, "from_step": 3}
    two(RUN, recipe=recipe, run_dir=str(run), sets=SHRINK, limit=limit, crash_at=6)
    assert json.loads((run / "micro_batch.json").read_text())["batch"]["micro"] == 1
    assert "  micro: 1\n" in (run / "recipe.yaml").read_text()
    told = two(RUN, recipe=recipe, run_dir=str(run), sets=SHRINK, limit=limit)
    assert [result["code"] for result in told] == [0, 0]
    assert len(read_events(run, "micro_batch_reduced")) == 2, "once when memory ran out, once at the start after it"
    assert read_events(run, "started")[-1]["batch"]["micro"] == 1
    asked = two(
        RUN,
        recipe=recipe,
        run_dir=str(run),
        sets=[*SHRINK, "batch.total=6", "batch.micro=3", "steps=8"],
        resume="auto",
        allowed=["steps"],
    )
    assert read_events(run, "started")[-1]["batch"]["micro"] == 3, "another size in the recipe counts again"
    assert asked[0]["code"] == 0


def test_a_micro_batch_of_one_sample_cannot_shrink(recipe: str, tmp_path: Path, two: Workers) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 2(.|\n)*can't allocate memory"):
        two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=SHRINK, limit={"samples": 0})
    (event,) = read_events(tmp_path / "run", "micro_batch_reduced")
    assert event["change"] == "batch.micro 2 -> 1", "before the last one"


@pytest.mark.parametrize(
    ("where", "preset"),
    [("backward", "zero2"), ("forward", "zero3"), SLOW("backward", "zero1"), SLOW("backward", "zero3")],
)
def test_a_single_process_saves_the_last_step_before_it_starts_again(
    where: str, preset: str, recipe: str, tmp_path: Path, one: Workers
) -> None:
    sets = [f"ds_config={preset}", "save.every=100", "batch.total=4", "batch.micro=2", *SHRINK]
    limit = {"samples": 1, "from_step": 4, "where": where, "rank": 0}
    wanted = reference(recipe, tmp_path / "reference", one, sets, until=3)
    with pytest.raises(WorkerError, match="can't allocate memory"):
        one(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, limit=limit)
    assert distance(state(tmp_path / "run", 3), state(wanted, 3)) == 0
    one(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[*sets, "batch.micro=1"])
    assert distance(state(tmp_path / "run"), state(wanted)) <= 1e-6
