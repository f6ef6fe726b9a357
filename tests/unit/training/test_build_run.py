"""Where a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.batch import Progress
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError
from dstrain.report.run_log import RunLog
from dstrain.training.build_run import prepare_start
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.start import ResumeOptions, find_resume_point
from dstrain.training.state.manifest import write_hashed_file


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    """Of steps 1 and 2."""
    made = CheckpointStore(folder=tmp_path / "checkpoints", world=SingleProcessWorld())
    for step in (1, 2):
        made.save(lambda folder: {"x": write_hashed_file(folder / "x", b"values")}, Progress(step, step), {})
    return made


def start(checkpoints: CheckpointStore) -> Any:
    journal = RunLog(checkpoints.folder.parent)
    for step in (1, 2, 3):
        journal.log_metrics({"step": step})
    return prepare_start(
        find_resume_point(checkpoints, ResumeOptions("auto")), checkpoints, journal, prune_when_full=False
    )


def damage(checkpoints: CheckpointStore, step: int) -> None:
    (checkpoints.folder / f"step-{step:08d}" / "x").write_bytes(b"Values")


def test_a_damaged_one_is_passed_over_and_later_rows_are_cut(checkpoints: CheckpointStore) -> None:
    damage(checkpoints, 2)
    assert start(checkpoints).step == 1
    assert len((checkpoints.folder.parent / "metrics.jsonl").read_text().splitlines()) == 1


def test_where_none_is_whole_nothing_begins_and_nothing_is_cut(checkpoints: CheckpointStore) -> None:
    damage(checkpoints, 1)
    damage(checkpoints, 2)
    words = r"all of its 2 checkpoints are damaged, step-00000002 is damaged: x is not what was written.*new --run-dir"
    with pytest.raises(CheckpointError, match=words):
        start(checkpoints)
    assert len((checkpoints.folder.parent / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_never_became_a_checkpoint_stops_no_beginning(checkpoints: CheckpointStore) -> None:
    for step in (1, 2):
        (checkpoints.folder / f"step-{step:08d}").rename(checkpoints.folder / f"step-{step:08d}.partial")
    assert start(checkpoints) is None
