"""A full disk is foreseen, and nothing is removed that was not asked to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.batch import Progress
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError
from dstrain.train import saver
from dstrain.train.checkpoints import CheckpointStore
from dstrain.train.saver import (
    DiskForecast,
    check_disk_space,
    compute_max_checkpoints,
    ensure_disk_space,
)
from dstrain.train.state.manifest import find_checkpoints, write_hashed_file

SIZE = 100_000


@pytest.mark.parametrize(
    ("saves", "keep", "keep_every", "wanted"),
    [
        (10, 3, None, 5),  # three, the best, and the one being written
        (1, 3, None, 1),
        (4, 3, None, 4),
        (10, None, None, 10),
        (10, 2, 500, 6),  # two kept for good
    ],
)
def test_how_many_lie_there_at_once(saves: int, keep: int | None, keep_every: int | None, wanted: int) -> None:
    assert compute_max_checkpoints(saves, keep, 100, keep_every) == wanted


def test_a_disk_that_will_be_full_is_told_before_training() -> None:
    each = 2**30
    assert check_disk_space(DiskForecast(each, 5, 6 * each), Path("/runs"), False) is None
    warning = check_disk_space(DiskForecast(each, 5, 4 * each), Path("/runs"), False)
    assert warning is not None
    assert "1.0 GiB each, at most 5 at a time take 5.0 GiB; 4.0 GiB are free: no. 5 would not fit" in warning
    assert check_disk_space(DiskForecast(each, 5, 4 * each), Path("/runs"), True) is None
    with pytest.raises(CheckpointError, match=r"a checkpoint takes 1\.0 GiB, and /runs has 0 B free; free some"):
        check_disk_space(DiskForecast(each, 5, 0), Path("/runs"), True)


@pytest.fixture
def kept(tmp_path: Path) -> CheckpointStore:
    """Three checkpoints, of which the first is the best."""
    checkpoints = CheckpointStore(folder=tmp_path, world=SingleProcessWorld(), keep=9)
    for step, metric in ((1, 0.1), (2, 0.5), (3, 0.4)):
        checkpoints.save(
            lambda folder: {"x": write_hashed_file(folder / "x", bytes(SIZE))}, Progress(step, step), {}, metric
        )
    return checkpoints


@pytest.fixture
def disk(kept: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[size of the disk]: free is what the checkpoints leave."""
    size = [10**9]
    used = lambda: sum(info.size for info in find_checkpoints(kept.folder) if info.is_complete)  # noqa: E731
    monkeypatch.setattr(saver, "get_free_bytes", lambda folder: size[0] - used())
    return size


def steps(kept: CheckpointStore) -> list[int]:
    return [info.step for info in find_checkpoints(kept.folder)]


def test_with_room_nothing_is_removed(kept: CheckpointStore, disk: list[int]) -> None:
    ensure_disk_space(kept, SIZE, True, lambda *_, **__: None)
    assert steps(kept) == [3, 2, 1]


def test_without_leave_nothing_is_removed(kept: CheckpointStore, disk: list[int]) -> None:
    disk[0] = 350_000
    with pytest.raises(CheckpointError, match=r"free some, lower save\.keep or set save\.prune_when_full"):
        ensure_disk_space(kept, SIZE, False, lambda *_, **__: None)
    assert steps(kept) == [3, 2, 1]


def test_with_leave_the_oldest_goes_first_the_best_last_and_the_newest_never(
    kept: CheckpointStore, disk: list[int]
) -> None:
    told: list[Any] = []
    tell = lambda event, **about: told.append((event, about["checkpoint"]))  # noqa: E731
    disk[0] = 350_000
    ensure_disk_space(kept, SIZE, True, tell)
    assert steps(kept) == [3, 1], "the best is step 1"
    disk[0] = 250_000
    ensure_disk_space(kept, SIZE, True, tell)
    assert steps(kept) == [3]
    assert told == [("checkpoint_removed", "step-00000002"), ("checkpoint_removed", "step-00000001")]
    disk[0] = 150_000
    with pytest.raises(CheckpointError, match=r"takes 100\.3 KiB, and \S+ has \S+ KiB free: free some\);"):
        ensure_disk_space(kept, SIZE, True, tell)
    assert steps(kept) == [3]
