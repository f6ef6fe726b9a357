"""A resumed run is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import SLOW
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, read_events, write_recipe
from tests.workers import Workers


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny reward model with dropout on, 32 pairs, 6 samples per step: an epoch ends within step 6."""
    folder = tmp_path_factory.mktemp("recipe")
    values = tiny_recipe("rm", folder)
    values |= {
        "options": {"disable_dropout": False},
        "steps": 8,
        "batch": {"total": 6, "micro": 2},
        "save": {"every": 2, "keep": 9},
        "eval": {"every": 4},
    }
    values["data"]["max_samples"] = 32
    values["model"]["config"]["attention_dropout"] = 0.1
    return str(write_recipe(folder, values))


@pytest.fixture(scope="module")
def whole(recipe: str, tmp_path_factory: pytest.TempPathFactory, two: Workers) -> Path:
    """The folder of a run that nothing broke off."""
    folder = tmp_path_factory.mktemp("whole")
    two(RUN, recipe=recipe, run_dir=str(folder))
    return folder


@pytest.mark.parametrize(
    ("preset", "precision"),
    # Stage 3: test_trained [sft-DoRA-zero3], test_tasks, test_elastic; states in bf16: parity/test_8bit_optimizers.
    [("zero1", "bf16"), SLOW("zero3", "fp32"), SLOW("zero3_hpz", "fp32"), SLOW("zero2_bf16", "bf16"),
     SLOW("zero0", "bf16"), SLOW("zero2", "fp32"), SLOW("zero3_offload", "bf16"), SLOW("zero0", "fp32"),
     SLOW("zero1", "fp32"), SLOW("zero2", "bf16"), SLOW("zero3", "bf16"), SLOW("zero2_offload", "fp32")],
)  # fmt: skip
def test_resuming_changes_nothing(preset: str, precision: str, recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = ["steps=13", f"ds_config={preset}", f"precision={precision}"]
    whole = two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    first = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets, crash_at=3)  # in the first epoch
    second = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets, crash_at=12)  # in the third
    third = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets)
    assert all(result["code"] == 0 for result in (*whole, *third))
    assert metric_rows(tmp_path / "broken") == metric_rows(tmp_path / "whole"), "bit for bit"
    for rank in (0, 1):
        assert (
            first[rank]["samples"][:2] + second[rank]["samples"][:8] + third[rank]["samples"] == whole[rank]["samples"]
        )
    assert [event["step"] for event in read_events(tmp_path / "broken", "resumed")] == [2, 10]


@pytest.mark.slow
def test_resuming_changes_nothing_where_the_number_of_passes_varies(recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = ["batch={total: 6, tokens_per_micro: 160}", "ds_config=zero2"]
    run = {"recipe": recipe, "sets": sets}
    two(RUN, **run, run_dir=str(tmp_path / "whole"))
    two(RUN, **run, run_dir=str(tmp_path / "broken"), crash_at=6)
    again = two(RUN, **run, run_dir=str(tmp_path / "broken"))
    assert all(result["code"] == 0 for result in again)
    assert metric_rows(tmp_path / "broken") == metric_rows(tmp_path / "whole"), "bit for bit"
    (started,) = read_events(tmp_path / "whole", "started")
    assert started["batch"] == {"total": 6, "micro": 6, "tokens_per_micro": 160}


def test_a_stopped_run_saves_at_once_and_goes_on_from_there(
    recipe: str, whole: Path, tmp_path: Path, two: Workers
) -> None:
    stopped = two(RUN, recipe=recipe, run_dir=str(tmp_path / "stopped"), stop_at=3)
    assert [result["code"] for result in stopped] == [75, 75], "a signal on rank 0 stops all ranks"
    assert (tmp_path / "stopped/checkpoints/step-00000003/MANIFEST.json").is_file()
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "stopped"))
    assert [result["code"] for result in again] == [0, 0]
    assert [row for row in metric_rows(tmp_path / "stopped") if row["split"] == "train"] == [
        row for row in metric_rows(whole) if row["split"] == "train"
    ]


@pytest.mark.slow
def test_a_checkpoint_that_was_asked_for_changes_nothing_else(
    recipe: str, whole: Path, tmp_path: Path, two: Workers
) -> None:
    saved = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), save_at=3)
    assert [result["code"] for result in saved] == [0, 0]
    assert [event["step"] for event in read_events(tmp_path / "run", "save_requested")] == [3]
    assert 3 in [event["step"] for event in read_events(tmp_path / "run", "saved")]
    assert metric_rows(tmp_path / "run") == metric_rows(whole), "bit for bit"


def test_a_finished_run_says_so_and_learns_nothing(recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = ["steps=3"]
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    assert [result["code"] for result in again] == [0, 0]
    assert again[0]["samples"] == []
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    assert read_events(tmp_path / "run", "already_finished")


def test_a_damaged_checkpoint_is_passed_over(recipe: str, whole: Path, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), crash_at=5)
    shard = next((tmp_path / "broken/checkpoints/step-00000004/state").glob("rank-00001*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"))
    assert [result["code"] for result in again] == [0, 0]
    assert read_events(tmp_path / "broken", "resumed")[0]["step"] == 2
    assert "sha256" in read_events(tmp_path / "broken", "checkpoint_skipped")[0]["why"]
    assert metric_rows(tmp_path / "broken") == metric_rows(whole)


@pytest.mark.slow
def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(
    recipe: str, whole: Path, tmp_path: Path, two: Workers
) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "back"), crash_at=8)
    older = str(tmp_path / "back/checkpoints/step-00000002")
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "back"), resume=older, crash_at=4)
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "back"))
    assert len(again[0]["samples"]) == 6, "from step 2, not from the newer one of before"
    assert metric_rows(tmp_path / "back") == metric_rows(whole)


@pytest.mark.slow
def test_what_does_not_change_learning_may_change_on_resume(
    recipe: str, whole: Path, tmp_path: Path, two: Workers
) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), crash_at=5)
    sets = ["data.workers=0", "save.every=3", "log.every=2", "timeout_minutes=5"]
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    assert [result["code"] for result in again] == [0, 0]
    assert metric_rows(tmp_path / "run")[-1] == metric_rows(whole)[-1]
