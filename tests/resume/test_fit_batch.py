"""`batch.on_oom: shrink`: the longest batch is tried before the first step and changes nothing but the micro-batch."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dstrain.training import fit_batch
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from tests.cells import SLOW
from tests.resume.cases import run
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, read_events, write_recipe
from tests.workers import WorkerError, Workers

SHRINK = "batch.on_oom=shrink"
COMPARED = ("step", "split", "loss", "grad_norm", "accuracy")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny reward model, 6 samples per step in passes of 2."""
    folder = tmp_path_factory.mktemp("recipe")
    values = tiny_recipe("rm", folder)
    values |= {"steps": 6, "batch": {"total": 6, "micro": 2}, "save": {"every": 2}, "eval": {"every": 6}}
    return str(write_recipe(folder, values))


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [{name: row.get(name) for name in COMPARED} for row in metric_rows(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "precision"),
    [
        ("zero0", "fp32"),
        ("zero2", "bf16"),
        ("zero3", "fp32"),
        SLOW("zero0", "bf16"),
        SLOW("zero1", "fp32"),
        SLOW("zero2", "fp32"),
        SLOW("zero3", "bf16"),
        SLOW("zero2_offload", "bf16"),
        SLOW("zero3_offload", "fp32"),
    ],
)
def test_the_trial_leaves_no_trace_in_the_run(
    preset: str, precision: str, recipe: str, tmp_path: Path, two: Workers
) -> None:
    sets = [f"ds_config={preset}", f"precision={precision}"]
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "stop"), sets=sets)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "shrink"), sets=[*sets, SHRINK])
    assert rows(tmp_path / "shrink") == rows(tmp_path / "stop")
    assert not read_events(tmp_path / "shrink", "micro_batch_reduced")


@pytest.mark.parametrize(
    ("where", "preset", "rank"),
    [SLOW("backward", "zero2", 1), ("forward", "zero3", 0), SLOW("backward", "zero3", 1), SLOW("forward", "zero0", 1)],
)
def test_a_batch_that_does_not_fit_is_halved_on_all_ranks(
    where: str, preset: str, rank: int, recipe: str, tmp_path: Path, two: Workers
) -> None:
    sets = [f"ds_config={preset}"]
    limit = {"samples": 1, "from_step": 0, "where": where, "rank": rank}
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "one"), sets=[*sets, "batch.micro=1"])
    told = two(RUN, recipe=recipe, run_dir=str(tmp_path / "shrink"), sets=[*sets, SHRINK], limit=limit)
    assert [result["code"] for result in told] == [0, 0]
    assert rows(tmp_path / "shrink") == rows(tmp_path / "one")
    (event,) = read_events(tmp_path / "shrink", "micro_batch_reduced")
    assert (event["step"], event["change"]) == (0, "batch.micro 2 -> 1")
    assert "  micro: 2\n" in (tmp_path / "shrink/recipe.yaml").read_text(), "the recipe stays as the user wrote it"


@pytest.mark.slow
def test_a_resumed_run_tries_the_recipes_size_again(recipe: str, tmp_path: Path, two: Workers) -> None:
    sets, run = ["ds_config=zero2", SHRINK], tmp_path / "run"
    limit = {"samples": 1, "from_step": 0, "where": "forward", "rank": 1}
    two(RUN, recipe=recipe, run_dir=str(run), sets=sets, stop_at=4, limit=limit)
    two(RUN, recipe=recipe, run_dir=str(run), sets=sets)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    losses = [row["loss"] for row in metric_rows(run) if row["split"] == "train"]
    whole = [row["loss"] for row in metric_rows(tmp_path / "whole") if row["split"] == "train"]
    assert losses == pytest.approx(whole, rel=1e-5)
    assert [event["step"] for event in read_events(run, "micro_batch_reduced")] == [0]


def test_a_single_sample_that_does_not_fit_ends_the_run(recipe: str, tmp_path: Path, one: Workers) -> None:
    limit = {"samples": 0, "from_step": 0, "where": "backward", "rank": 0}
    with pytest.raises(WorkerError, match="can't allocate memory"):
        one(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[SHRINK], limit=limit)
    changes = [event["change"] for event in read_events(tmp_path / "run", "micro_batch_reduced")]
    assert changes == ["batch.micro 2 -> 1"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero0", "zero2", "zero3"])
def test_an_engine_that_ran_out_of_memory_is_freed(preset: str, recipe: str, tmp_path: Path, one: Workers) -> None:
    (is_alive,) = one(f"{__name__}:train_after_a_trial", recipe=recipe, run_dir=str(tmp_path / "run"), preset=preset)
    assert is_alive == [False]


def train_after_a_trial(recipe: str, run_dir: str, preset: str) -> list[bool]:
    """Train with one failed trial; return whether the first module was still in memory when the second one was built."""
    modules, is_alive = [], []
    build, free = DeepSpeedEngine.__init__, fit_batch.free_cached_memory

    def initialize(engine: DeepSpeedEngine, train_module: torch.nn.Module, *args: Any) -> None:
        modules.append(weakref.ref(train_module))
        build(engine, train_module, *args)  # type: ignore[arg-type]

    def free_and_look() -> None:
        free()
        is_alive.append(modules[0]() is not None)

    limit = {"samples": 1, "from_step": 0, "where": "backward", "rank": 0}
    with (
        mock.patch.object(DeepSpeedEngine, "__init__", initialize),
        mock.patch.object(fit_batch, "free_cached_memory", free_and_look),
    ):
        run(recipe, run_dir, [f"ds_config={preset}", SHRINK], limit=limit)
    return is_alive
