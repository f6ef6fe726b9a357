"""Where a run begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.batch import Progress
from dstrain.config.schema import RunConfig
from dstrain.distributed.world import SoloWorld
from dstrain.errors import CheckpointError
from dstrain.report.run_log import Journal
from dstrain.train.checkpoint.checkpoints import Checkpoints
from dstrain.train.run_dir import Resume
from dstrain.train.setup import _starting_point
from dstrain.train.state.hashed_file import write_hashed


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Of steps 1 and 2."""
    made = Checkpoints(folder=tmp_path / "checkpoints", world=SoloWorld())
    for step in (1, 2):
        made.save(lambda folder: {"x": write_hashed(folder / "x", b"values")}, Progress(step, step), {})
    return made


def start(checkpoints: Checkpoints) -> Any:
    plan: Any = SimpleNamespace(resume=Resume("auto"), config=RunConfig.model_validate({"task": "rm"}))
    journal = Journal(checkpoints.folder.parent)
    for step in (1, 2, 3):
        journal.write({"step": step})
    return _starting_point(plan, checkpoints, journal, SoloWorld())


def damage(checkpoints: Checkpoints, step: int) -> None:
    (checkpoints.folder / f"step-{step:08d}" / "x").write_bytes(b"Values")


def test_a_damaged_one_is_passed_over_and_later_rows_are_cut(checkpoints: Checkpoints) -> None:
    damage(checkpoints, 2)
    assert start(checkpoints).step == 1
    assert len((checkpoints.folder.parent / "metrics.jsonl").read_text().splitlines()) == 1


def test_where_none_is_whole_nothing_begins_and_nothing_is_cut(checkpoints: Checkpoints) -> None:
    damage(checkpoints, 1)
    damage(checkpoints, 2)
    words = r"none of its 2 checkpoints is whole, step-00000002 is damaged: x is not what was written.*new --run-dir"
    with pytest.raises(CheckpointError, match=words):
        start(checkpoints)
    assert len((checkpoints.folder.parent / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_never_became_a_checkpoint_stops_no_beginning(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        (checkpoints.folder / f"step-{step:08d}").rename(checkpoints.folder / f"step-{step:08d}.partial")
    assert start(checkpoints) is None
