"""Saving behind training changes nothing but the time that training waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, read_events, write_recipe
from tests.workers import WorkerError, Workers


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    values = tiny_recipe("rm", tmp_path)
    values |= {"steps": 9, "batch": {"total": 6, "micro": 2}, "save": {"every": 2, "keep": 9, "background": True}}
    write_recipe(tmp_path, values)
    return str(tmp_path / "recipe.yaml")


def hashes(checkpoint: Path) -> dict[str, Any]:
    """Of the files that hold the state, as the manifest has them."""
    files = json.loads((checkpoint / "MANIFEST.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.startswith("state/")}


@pytest.mark.parametrize("preset", ["zero1", pytest.param("zero3_offload", marks=pytest.mark.slow)])
def test_what_is_written_behind_training_is_what_training_would_have_waited_for(
    preset: str, recipe: str, tmp_path: Path, two: Workers
) -> None:
    sets = [f"ds_config={preset}"]
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "waits"), sets=[*sets, "save.background=false"])
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "behind"), sets=sets, crash_at=8)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "behind"), sets=sets)
    assert metric_rows(tmp_path / "behind") == metric_rows(tmp_path / "waits")
    for step in (2, 4, 6, 8, 9):
        one, other = (hashes(tmp_path / run / f"checkpoints/step-{step:08d}") for run in ("waits", "behind"))
        assert {"state/about.json", "state/rank-00000-000.safetensors"} <= one.keys()
        assert one == other
    told = read_events(tmp_path / "behind", "saved")
    # Whether 6 landed, and 8 was begun, before the crash in step 8 depends on the machine.
    assert [event["step"] for event in told if event["step"] not in (6, 8)] == [2, 4, 9]
    assert all(0 < event["stall_seconds"] <= event["seconds"] for event in told)
    lines = (tmp_path / "behind/metrics.jsonl").read_text().splitlines()
    assert any("save_stall_seconds" in json.loads(line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_where_one_rank_cannot_write_all_ranks_stop(
    background: bool, recipe: str, tmp_path: Path, two: Workers
) -> None:
    sets = [f"save.background={background}".lower()]
    # Not in the background: a crash may come before a background save is complete.
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["save.background=false"], crash_at=4)
    with pytest.raises(
        WorkerError, match=r"writing step-00000004 failed on 1 of 2 ranks \(rank 1: OSError: .*No space"
    ):
        two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, full=True)
    # A rank that is ended before it has removed what it wrote leaves a partial folder, which the next save removes.
    names = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert [name for name in names if not name.endswith(".partial")] == ["step-00000002"]


@pytest.mark.slow
def test_a_step_takes_one_sum_over_the_ranks_and_the_same_losses(recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = ["log.every=9", "eval.every=9"]
    counts = {
        workers: two(
            "tests.resume.cases:count_sums",
            recipe=recipe,
            run_dir=str(tmp_path / str(workers)),
            sets=[*sets, f"data.workers={workers}"],
        )
        for workers in (0, 2)
    }
    assert counts[0][0] == counts[0][1]
    assert counts[2][0] == counts[2][1]
    assert counts[2][0][2:8:2] == [1] * 3, "while a background save is written, too"
    assert counts[2][0][1:8:2] == [2] * 4, "a save begins with one of its own"
    assert counts[2][0][0] == 2, "the weight of the first step is not known before"
    assert counts[0][0][2:8:2] == [2] * 3, "without threads the data of the next step is not there"
    assert metric_rows(tmp_path / "0") == metric_rows(tmp_path / "2")


@pytest.mark.slow
def test_where_a_copy_does_not_fit_training_waits_and_says_why(recipe: str, tmp_path: Path, one: Workers) -> None:
    one(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["steps=5"], memory=0)
    (why,) = read_events(tmp_path / "run", "async_save_unavailable")
    assert "does not fit into host memory" in why["why"]
    assert [event["stall_seconds"] == event["seconds"] for event in read_events(tmp_path / "run", "saved")] == [
        True
    ] * 3
