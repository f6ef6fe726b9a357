"""`best` as a folder, which a copy without links makes of it: no save removes the only copy of a checkpoint."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from dstrain.batch import Progress
from dstrain.train.checkpoints import CheckpointStore, select_checkpoint
from dstrain.train.state.manifest import FileEntry, find_checkpoints, write_hashed_file
from tests.unit.distributed.thread_world import ThreadWorld


def solo(folder: Path, **options: Any) -> CheckpointStore:
    return CheckpointStore(
        folder=folder, world=ThreadWorld(0, 1, [None], threading.Barrier(1)), best_mode="max", **options
    )


def write(folder: Path) -> dict[str, FileEntry]:
    return {"rank-00000.dat": write_hashed_file(folder / "rank-00000.dat", b"o" * 10)}


def save(checkpoints: CheckpointStore, step: int, metric: float | None) -> None:
    checkpoints.save(write, Progress(step, 64 * step), {"zero_stage": 2, "preset": "zero2"}, metric)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The best checkpoint, of step 1, as a folder `best` beside that of step 3."""
    at = tmp_path / "run/checkpoints"
    save(solo(at), 1, 0.9)
    save(solo(at), 3, 0.8)
    (at / "best").unlink()
    os.rename(at / "step-00000001", at / "best")
    return at


def aside(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith("best-")]


def test_a_copy_whose_checkpoint_is_not_beside_it_is_that_checkpoint_again(folder: Path) -> None:
    assert select_checkpoint(folder.parent, "best").metric == 0.9
    save(solo(folder), 4, 0.7)
    assert os.readlink(folder / "best") == "step-00000001"
    assert select_checkpoint(folder.parent, "best").metric == 0.9
    assert [info.step for info in find_checkpoints(folder, check_hashes=True) if info.is_complete] == [4, 3, 1]


def test_a_better_one_takes_its_place_and_it_is_kept_as_any_other(folder: Path) -> None:
    save(solo(folder), 4, 0.95)
    assert os.readlink(folder / "best") == "step-00000004"
    assert [info.metric for info in find_checkpoints(folder)] == [0.95, 0.8, 0.9]
    assert not aside(folder)


def test_a_second_copy_is_removed(folder: Path) -> None:
    shutil.copytree(folder / "best", folder / "step-00000001")
    save(solo(folder), 4, 0.95)
    assert sorted(path.name for path in folder.iterdir()) == [
        "best", "step-00000001", "step-00000003", "step-00000004",
    ]  # fmt: skip


def test_a_copy_takes_the_place_of_a_damaged_checkpoint(folder: Path) -> None:
    shutil.copytree(folder / "best", folder / "step-00000001")
    (folder / "step-00000001/rank-00000.dat").unlink()
    save(solo(folder), 4, 0.7)
    assert select_checkpoint(folder.parent, "best").metric == 0.9
    assert os.readlink(folder / "best") == "step-00000001"
    assert [path.name[:14] for path in folder.iterdir() if len(path.name) > 20] == ["step-00000001-"], "set aside"


def test_a_damaged_copy_is_set_aside(folder: Path) -> None:
    (folder / "best/rank-00000.dat").unlink()
    save(solo(folder), 4, 0.7)
    assert os.readlink(folder / "best") == "step-00000003"
    assert [(folder / name / "MANIFEST.json").is_file() for name in aside(folder)] == [True]


@pytest.mark.parametrize("saved", [4, 10])
def test_a_copy_of_a_later_step_than_the_run_goes_on_from_is_set_aside(saved: int, folder: Path) -> None:
    """A later start must not go on from it: the steps before it are not those of this run any more."""
    os.rename(folder / "best", folder / "aside")
    save(solo(folder), 9, 0.9)
    (folder / "best").unlink()
    os.rename(folder / "step-00000009", folder / "best")
    checkpoints = solo(folder)
    start, _ = checkpoints.find_latest_valid()
    assert start is not None
    checkpoints.supersede_newer(start)
    save(checkpoints, saved, 0.7)
    save(checkpoints, 12, 0.7)
    assert os.readlink(folder / "best") == "step-00000003"
    assert [info.step for info in find_checkpoints(folder)] == [12, saved, 3]
    assert [(folder / name / "MANIFEST.json").is_file() for name in aside(folder)] == [True]


def test_a_run_without_metrics_keeps_the_copy(folder: Path) -> None:
    shutil.rmtree(folder / "step-00000003")
    save(solo(folder), 4, None)
    assert os.readlink(folder / "best") == "step-00000001"
