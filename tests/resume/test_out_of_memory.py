"""A run that runs out of memory goes on with half the micro-batch: its weights are those of a run with that size."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_a_restart_after_a_pass_without_memory_halves_the_micro_batch(
    recipe: str, tmp_path: Path, two: Workers
) -> None:
    sets, run = ["ds_config=zero2", *SHRINK], tmp_path / "run"
    limit = {"samples": 1, "from_step": 4}
    wanted = reference(recipe, tmp_path / "reference", two, sets)
    with pytest.raises(WorkerError, match=r"rank 1 of 2(.|\n)*can't allocate memory"):
        two(RUN, recipe=recipe, run_dir=str(run), sets=sets, limit=limit)
    assert json.loads((run / "micro_batch.json").read_text())["batch"]["micro"] == 1
    assert "  micro: 1\n" in (run / "recipe.yaml").read_text()
    told = two(RUN, recipe=recipe, run_dir=str(run), sets=sets, limit=limit)
    assert [result["code"] for result in told] == [0, 0]
    assert distance(state(run), state(wanted)) <= 1e-6
    (event,) = read_events(run, "micro_batch_reduced")
    assert (event["step"], event["change"]) == (2, "batch.micro 2 -> 1")
    assert read_events(run, "started")[-1]["batch"]["micro"] == 1
    losses = [row["loss"] for row in metric_rows(run) if row["split"] == "train"]
    assert losses == pytest.approx([row["loss"] for row in metric_rows(wanted) if row["split"] == "train"], rel=1e-6)
    more = [*sets, "batch.total=6", "batch.micro=3", "steps=8"]
    two(RUN, recipe=recipe, run_dir=str(run), sets=more, allowed=["steps"])
    assert read_events(run, "started")[-1]["batch"]["micro"] == 3, "another size in the recipe counts again"


@pytest.mark.parametrize(
    ("where", "preset"),
    [("backward", "zero2"), SLOW("forward", "zero3"), SLOW("backward", "zero1"), SLOW("backward", "zero3")],
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
