"""Early stopping ends a run after the same evaluation, interrupted or not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dstrain.config.read import read_recipe
from dstrain.errors import RecipeError
from dstrain.schedule import EarlyStopping
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke, read_events, read_jsonl, write_recipe
from tests.workers import Workers

CASE = "tests.contract.best_cases:run_with_losses"
LOSSES = {1: 0.9, 2: 0.5, 3: 0.6, 4: math.nan, 5: 0.5, 6: 0.4, 7: 0.7, 8: 0.7, 9: 0.7, 10: 0.3}
"""Step -> loss on held-out data. With a patience of 3 the run ends after step 5, since 0.5 is no better than 0.5."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    values = tiny_recipe("rm", tmp_path) | {"steps": 10, "batch": {"total": 4, "micro": 2}}
    values |= {"eval": {"every": 1, "patience": 3}, "save": {"every": 2, "keep": 1}, "log": {"every": 4}}
    return str(write_recipe(tmp_path, values))


def test_a_run_ends_after_patience_evaluations_without_a_better_metric(
    recipe: str, tmp_path: Path, two: Workers
) -> None:
    run = tmp_path / "run"
    results = two(CASE, recipe=recipe, run_dir=str(run), losses=LOSSES)
    assert [result["code"] for result in results] == [0, 0]
    assert [len(result["samples"]) for result in results] == [5, 5]
    (event,) = read_events(run, "early_stopping")
    assert {name: event[name] for name in ("step", "best", "best_step", "counter")} == {
        "step": 5, "best": 0.5, "best_step": 2, "counter": 3,
    }  # fmt: skip
    assert [event["step"] for event in read_events(run, "finished")] == [5]
    assert (run / "checkpoints/best").resolve().name == "step-00000002"
    rows = [(row["split"], row["step"]) for row in read_jsonl(run / "metrics.jsonl")]
    assert rows[-2:] == [("eval", 5), ("train", 5)], "the last row of the training is written too"


@pytest.mark.slow
def test_a_resumed_run_ends_after_the_same_evaluation(recipe: str, tmp_path: Path, two: Workers) -> None:
    """Also in another folder, which has no metrics.jsonl: the checkpoint holds the count."""
    run = tmp_path / "run"
    two(CASE, recipe=recipe, run_dir=str(run), losses=LOSSES, crash_at=5)
    (run / "metrics.jsonl").unlink()
    results = two(CASE, recipe=recipe, run_dir=str(run), losses=LOSSES)
    assert [len(result["samples"]) for result in results] == [1, 1], (
        "step 4 counts two evaluations without a better one"
    )
    assert [event["step"] for event in read_events(run, "finished")] == [5]

    again = two(CASE, recipe=recipe, run_dir=str(run), losses=LOSSES)
    assert [(result["code"], result["samples"]) for result in again] == [(0, [])] * 2
    assert [event["step"] for event in read_events(run, "already_finished")] == [5]

    longer = two(CASE, recipe=recipe, run_dir=str(run), losses=LOSSES, sets=["eval.patience=4"])
    assert [len(result["samples"]) for result in longer] == [5, 5], (
        "a larger patience continues: to step 10, 0.4 was better"
    )
    assert [event["step"] for event in read_events(run, "finished")] == [5, 10]


def test_the_count_of_another_metric_is_not_continued() -> None:
    first = EarlyStopping(metric="loss", mode="min", patience=1)
    first.add(1, 0.5)
    first.add(2, 0.6)
    assert first.is_due
    other, same = (EarlyStopping(metric=name, mode="min", patience=1) for name in ("accuracy", "loss"))
    for one in (other, same):
        one.load_state_dict(first.state_dict())
    assert (other.is_due, same.is_due) == (False, True)


def test_higher_is_better_where_the_recipe_says_so() -> None:
    stopping = EarlyStopping(metric="accuracy", mode="max", patience=2)
    for step, value in enumerate((0.1, 0.3, 0.2, 0.4)):
        stopping.add(step, value)
    assert (stopping.best, stopping.best_step, stopping.counter) == (0.4, 3, 0)


def test_patience_without_held_out_data_is_refused(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"eval": {"patience": 3}}
    values["data"] = {"train": values["data"]["train"]}
    with pytest.raises(RecipeError, match=r"eval.patience: needs evaluations, but there is no held-out data"):
        read_recipe(write_recipe(tmp_path, values))
    assert invoke("train", tmp_path / "recipe.yaml", "--dry-run").exit_code == 2
