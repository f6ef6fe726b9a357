"""Behind training at most one checkpoint is in flight, and what it holds is what was there when it was asked for."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.batch import Progress
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError
from dstrain.training import saver
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.saver import (
    CheckpointSaver,
    check_disk_space,
    compute_max_checkpoints,
    ensure_disk_space,
)
from dstrain.training.state import files
from dstrain.training.state.files import CheckpointReader, StateFile
from dstrain.training.state.manifest import find_checkpoints, write_hashed_file


class Weights:
    """An engine of one tensor."""

    world = SingleProcessWorld()

    def __init__(self) -> None:
        self.values = torch.zeros(1000)

    def state_files(self) -> Iterator[StateFile]:
        yield StateFile("rank-00000-000.safetensors", [("w/weight@0", self.values)])

    def state_metadata(self) -> dict[str, Any]:
        return {"shapes": {"w": [1000]}, "optimizer": "sgd"}


def saving(folder: Path, engine: Any, told: list[Any], **options: Any) -> CheckpointSaver:
    def tell(event: str, **about: Any) -> None:
        told.append((event, about))

    checkpoints = CheckpointStore(folder=folder, world=SingleProcessWorld())
    return CheckpointSaver(
        checkpoints=checkpoints,
        engine=engine,
        run_info={},
        log_event=tell,
        checkpoint_size=4000,
        **{"background": True, **options},
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    event, write = threading.Event(), files.write_state_file

    def wait(folder: Path, shard: StateFile) -> Any:
        assert event.wait(30)
        return write(folder, shard)

    monkeypatch.setattr(files, "write_state_file", wait)
    return event


def test_training_goes_on_and_the_checkpoint_holds_what_was_there(tmp_path: Path, gate: threading.Event) -> None:
    engine, told = Weights(), []  # type: ignore[var-annotated]
    kept = saving(tmp_path, engine, told)
    engine.values.fill_(1)
    kept.save(Progress(1, 1), None)
    assert kept.is_writing
    assert not list(tmp_path.glob("step-*1/MANIFEST.json"))
    engine.values.fill_(2)  # training
    gate.set()
    kept.save(Progress(2, 2), None)  # waits for the first
    assert [event for event, _ in told] == ["saved"]
    kept.wait()
    for step in (1, 2):
        assert set(CheckpointReader(tmp_path / f"step-{step:08d}").read_tensor("w").tolist()) == {float(step)}
    assert all(0 < about["stall_seconds"] < about["seconds"] for _, about in told)
    spent = kept.pop_timings()
    assert 0 < spent["save_stall_seconds"] < spent["save_seconds"]
    assert kept.pop_timings() == {}


def test_the_last_one_is_there_on_return(tmp_path: Path) -> None:
    told: list[Any] = []
    kept = saving(tmp_path, Weights(), told)
    kept.save(Progress(1, 1), None, is_last=True)
    assert [about["step"] for _, about in told] == [1]
    assert told[0][1]["stall_seconds"] == told[0][1]["seconds"]


def test_a_failure_is_raised_where_training_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    kept = saving(tmp_path, Weights(), [])
    kept.save(Progress(1, 1), None)
    kept.wait()
    monkeypatch.setattr(files, "write_state_file", full)
    kept.save(Progress(2, 2), None)
    with pytest.raises(CheckpointError, match="No space left on device"):
        kept.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("background", [True, False])
def test_a_second_try_writes_the_whole_state_again(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, tries, told = files.write_state_file, [], list[Any]()

    def fail_once(folder: Path, shard: StateFile) -> Any:
        tries.append(write(folder, shard))
        if len(tries) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return tries[-1]

    monkeypatch.setattr("dstrain.training.checkpoints.RETRY_SECONDS", 0)
    monkeypatch.setattr(files, "write_state_file", fail_once)
    kept = saving(tmp_path, Weights(), told, background=background)
    kept.save(Progress(1, 1), None)
    kept.wait()
    assert [event for event, _ in told] == ["save_retried", "saved"]
    assert "warning: a save failed, and was tried again: writing step-00000001 failed on" in capsys.readouterr().out
    assert CheckpointReader(tmp_path / "step-00000001").read_tensor("w").tolist() == [0.0] * 1000


@pytest.mark.parametrize("why", ["disk", "memory"])
def test_where_a_copy_cannot_be_made_training_waits_and_it_is_said_once(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    if why == "memory":
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    kept = saving(tmp_path, Weights(), told, is_state_on_nvme=why == "disk")
    for step in (1, 2):
        kept.save(Progress(step, step), None)
    assert [event for event, _ in told] == ["async_save_unavailable", "saved", "saved"]
    assert ("is on a disk" if why == "disk" else "does not fit into host memory") in told[0][1]["why"]


# A full disk is foreseen, and nothing is removed that was not asked to be.


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
def test_the_most_checkpoints_on_disk_are_counted(
    saves: int, keep: int | None, keep_every: int | None, wanted: int
) -> None:
    assert compute_max_checkpoints(saves, keep, 100, keep_every) == wanted


def test_a_disk_that_will_be_full_is_told_before_training() -> None:
    each = 2**30
    assert check_disk_space(each, 5, 6 * each, Path("/runs"), False) is None
    warning = check_disk_space(each, 5, 4 * each, Path("/runs"), False)
    assert warning is not None
    assert "1.0 GiB each, at most 5 at a time take 5.0 GiB; 4.0 GiB are free: no. 5 would not fit" in warning
    assert check_disk_space(each, 5, 4 * each, Path("/runs"), True) is None
    with pytest.raises(CheckpointError, match=r"a checkpoint takes 1\.0 GiB, and /runs has 0 B free; free some"):
        check_disk_space(each, 5, 0, Path("/runs"), True)


@pytest.mark.parametrize("answer", ["error", "none"])
def test_a_disk_that_does_not_tell_its_room_is_written_to(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk then fails in the write."""

    def usage(path: Path) -> SimpleNamespace:
        if answer == "error":
            raise OSError(errno.ESTALE, "Stale file handle")
        return SimpleNamespace(total=0, free=0)

    monkeypatch.setattr("shutil.disk_usage", usage)
    free = saver.get_free_bytes(tmp_path)
    assert free is None
    assert check_disk_space(2**30, 5, free, tmp_path, False) is None
    store = CheckpointStore(folder=tmp_path, world=SingleProcessWorld(), keep=9)
    saver.ensure_disk_space(store, 2**60, True, lambda *_, **__: pytest.fail("a checkpoint was removed"))


def test_a_host_that_does_not_tell_its_memory_has_no_background_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("not enough values to unpack")

    monkeypatch.setattr("psutil.virtual_memory", fail)
    told: list[tuple[str, dict[str, Any]]] = []
    saving(tmp_path, Weights(), told).save(Progress(1, 1), None)
    assert [event for event, _ in told] == ["async_save_unavailable", "saved"]


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


def test_with_room_or_without_leave_nothing_is_removed(kept: CheckpointStore, disk: list[int]) -> None:
    ensure_disk_space(kept, SIZE, True, lambda *_, **__: None)
    assert steps(kept) == [3, 2, 1]
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
