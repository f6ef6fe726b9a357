"""A resumed run is the same run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.tasks import find_task
from tests.workers import WorkerError, Workers

RUN = "tests.resume.cases:run"
SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The tiny reward model with dropout on, 64 pairs, 6 samples per step: an epoch ends within step 11."""
    values = find_task("rm").tiny(tmp_path)
    values |= {
        "options": {"disable_dropout": False},
        "steps": 26,
        "batch": {"total": 6, "micro": 2},
        "save": {"every": 4, "keep": 9},
    }
    values["model"]["config"]["attention_dropout"] = 0.1
    values["eval"] = {"every": 8}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return str(tmp_path / "recipe.yaml")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or the machine says."""
    told = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    same = ("step", "samples", "epoch", "split", "loss", "accuracy", "margin", "lr", "grad_norm")
    return [{name: row[name] for name in same if name in row} for row in told]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in told if event["event"] == name]


@pytest.mark.parametrize(
    ("preset", "precision"),
    [("zero1", "bf16"), ("zero3", "fp32"), SLOW("zero0", "bf16"), SLOW("zero2", "fp32"), SLOW("zero3_offload", "bf16"),
     SLOW("zero0", "fp32"), SLOW("zero1", "fp32"), SLOW("zero2", "bf16"), SLOW("zero3", "bf16"), SLOW("zero2_offload", "fp32")],
)  # fmt: skip
def test_resuming_changes_nothing(preset: str, precision: str, recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = [f"ds_config={preset}", f"precision={precision}"]
    whole = two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    first = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets, crash_at=7)  # in the first epoch
    second = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets, crash_at=23)  # in the third
    third = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets)
    assert all(result["code"] == 0 for result in (*whole, *third))
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole"), "bit for bit"
    for rank in (0, 1):
        assert (
            first[rank]["samples"][:4] + second[rank]["samples"][:16] + third[rank]["samples"] == whole[rank]["samples"]
        )
    assert [event["step"] for event in events(tmp_path / "broken", "resumed")] == [4, 20]


def test_a_stopped_run_saves_at_once_and_goes_on_from_there(recipe: str, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"))
    stopped = two(RUN, recipe=recipe, run_dir=str(tmp_path / "stopped"), stop_at=6)
    assert [result["code"] for result in stopped] == [75, 75], "a signal on rank 0 stops all ranks"
    assert (tmp_path / "stopped/checkpoints/step-00000006/MANIFEST.json").is_file()
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "stopped"))
    assert [result["code"] for result in again] == [0, 0]
    assert [row for row in rows(tmp_path / "stopped") if row["split"] == "train"] == [
        row for row in rows(tmp_path / "whole") if row["split"] == "train"
    ]


def test_a_finished_run_says_so_and_learns_nothing(recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = ["steps=3"]
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    assert [result["code"] for result in again] == [0, 0]
    assert again[0]["samples"] == []
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    assert events(tmp_path / "run", "already_finished")


def test_a_damaged_checkpoint_is_passed_over(recipe: str, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"))
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), crash_at=10)
    shard = next((tmp_path / "broken/checkpoints/step-00000008/state").glob("rank-00001*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"))
    assert [result["code"] for result in again] == [0, 0]
    assert events(tmp_path / "broken", "resumed")[0]["step"] == 4
    assert "sha256" in events(tmp_path / "broken", "checkpoint_skipped")[0]["why"]
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole")


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(recipe: str, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"))
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "back"), crash_at=15)
    older = str(tmp_path / "back/checkpoints/step-00000004")
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "back"), resume=older, crash_at=7)
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "back"))
    assert len(again[0]["samples"]) == 22, "from step 4, not from the newer one of before"
    assert rows(tmp_path / "back") == rows(tmp_path / "whole")


def test_what_does_not_change_learning_may_change_on_resume(recipe: str, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"))
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), crash_at=10)
    sets = ["data.workers=0", "save.every=5", "log.every=2", "timeout_minutes=5"]
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    assert [result["code"] for result in again] == [0, 0]
    assert rows(tmp_path / "run")[-1] == rows(tmp_path / "whole")[-1]


def test_what_changes_learning_is_refused_by_name(recipe: str, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), crash_at=6)
    with pytest.raises(WorkerError, match=r"optim\.lr: is 0\.5, but the run was started with 0\.001"):
        two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["optim.lr=0.5"])
