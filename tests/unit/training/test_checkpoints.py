"""A checkpoint is whole or absent."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dstrain
from dstrain.batch import Progress
from dstrain.errors import CheckpointError, RunFolderLockedError, UsageError
from dstrain.training import checkpoints as checkpoints_module
from dstrain.training.checkpoints import CheckpointStore, find_best
from dstrain.training.state import manifest
from dstrain.training.state.manifest import (
    MANIFEST_FORMAT,
    FileEntry,
    find_checkpoints,
    find_latest_complete,
    inspect_checkpoint,
    make_damaged_info,
    read_file_entries,
    write_hashed_file,
)
from tests.unit.distributed.thread_world import ThreadWorld, on_ranks


class OneRank:
    """A World of one process that does not import torch."""

    rank, size, device = 0, 1, None

    def gather(self, value: Any) -> list[Any]:
        return [value]


def solo(folder: Path, **options: Any) -> CheckpointStore:
    return CheckpointStore(folder=folder, world=OneRank(), **options)  # type: ignore[arg-type]


def write(folder: Path) -> dict[str, FileEntry]:
    files = {"model/weights.dat": b"w" * 1000, "rank-00000.dat": b"o" * 10}
    return {name: write_hashed_file(folder / name, content) for name, content in files.items()}


def save(
    checkpoints: CheckpointStore,
    *steps: int,
    metric: float | None = None,
    by: Callable[..., Any] = write,
    mode: str = "min",
    metric_name: str = "loss",
) -> None:
    """Save checkpoints of a run whose recipe has this `eval.best` and `eval.metric`."""
    recipe = {"eval": {"best": mode, "metric": metric_name}}
    for step in steps:
        checkpoints.save(by, Progress(step, 64 * step), {"zero_stage": 2, "preset": "zero2", "recipe": recipe}, metric)


def steps(folder: Path) -> list[int]:
    return [info.step for info in find_checkpoints(folder, check_hashes=True) if info.is_complete]


def best(folder: Path) -> str:
    return os.readlink(folder / "best")


def test_a_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    save(solo(tmp_path), 200, metric=0.25)
    info, passed_over = solo(tmp_path).find_latest_valid()
    assert info is not None
    assert passed_over == []
    assert (info.step, info.samples, info.world_size, info.zero_stage, info.metric) == (200, 12800, 1, 2, 0.25)
    assert info.path == tmp_path / "step-00000200"
    assert info.progress == Progress(200, 12800)
    assert info.run_info["preset"] == "zero2"
    assert info.size == sum(path.stat().st_size for path in info.path.rglob("*") if path.is_file())
    manifest = json.loads((info.path / "MANIFEST.json").read_text())
    assert sorted(manifest["files"]) == ["model/weights.dat", "progress.json", "rank-00000.dat", "run.json"]
    assert manifest["files_per_rank"] == [1]
    assert json.loads((info.path / "progress.json").read_text()) == {"step": 200, "samples": 12800}


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert solo(tmp_path / "checkpoints").find_latest_valid() == (None, [])
    assert solo(tmp_path / "checkpoints").remove_incomplete() == []


def test_a_partial_checkpoint_is_never_read(tmp_path: Path) -> None:
    save(solo(tmp_path), 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.partial")
    info, passed_over = solo(tmp_path).find_latest_valid()
    assert info is not None
    assert (info.step, passed_over) == (1, [])
    assert solo(tmp_path).remove_incomplete() == ["step-00000002.partial"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def _truncate(path: Path) -> None:
    os.truncate(path / "model" / "weights.dat", 10)


def _flip(path: Path) -> None:
    (path / "model" / "weights.dat").write_bytes(b"w" * 999 + b"v")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "MANIFEST.json is missing": lambda path: (path / "MANIFEST.json").unlink(),
    "MANIFEST.json is not readable": lambda path: os.truncate(path / "MANIFEST.json", 30),
    "run.json is missing": lambda path: (path / "run.json").unlink(),
    "model/weights.dat has 10 bytes instead of 1000": _truncate,
    "model/weights.dat is not what was written": _flip,
    "MANIFEST.json is of step 3": lambda path: shutil.copytree(path, path.with_name("step-00000004")) and None,
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_the_newest_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path: Path, reason: str) -> None:
    save(solo(tmp_path), 2, 3)
    DAMAGES[reason](tmp_path / "step-00000003")
    info, passed_over = solo(tmp_path).find_latest_valid()
    assert info is not None
    assert info.step == (3 if "of step" in reason else 2)
    assert len(passed_over) == 1
    assert passed_over[0].status.startswith(f"damaged: {reason}")


@pytest.mark.slow
def test_any_flipped_bit_of_a_manifest_is_found_or_changes_nothing_that_it_tells(tmp_path: Path) -> None:
    save(solo(tmp_path), 3, metric=0.5)
    manifest = tmp_path / "step-00000003" / "MANIFEST.json"
    content = manifest.read_bytes()
    told = inspect_checkpoint(manifest.parent), read_file_entries(manifest.parent)
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        manifest.write_bytes(changed)
        info = inspect_checkpoint(manifest.parent)
        if info.is_complete and read_file_entries(manifest.parent) == told[1]:
            assert info == told[0], changed
        elif inspect_checkpoint(manifest.parent, check_hashes=True).is_complete:
            raise AssertionError(f"not found: {changed!r}")


def test_a_file_without_its_hashes_is_not_whole(tmp_path: Path) -> None:
    save(solo(tmp_path), 1)
    path = tmp_path / "step-00000001" / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["rank-00000.dat"]["sha256"] = []
    path.write_text(json.dumps(manifest))
    assert "names 0 hashes of rank-00000.dat" in inspect_checkpoint(path.parent).status


@pytest.mark.parametrize("per_rank", [[1, 1], [0], [], "1"])
def test_a_manifest_without_the_files_of_a_rank_is_damaged(tmp_path: Path, per_rank: object) -> None:
    save(solo(tmp_path), 1, 2)
    rewrite(tmp_path / "step-00000002", lambda manifest: manifest.update(files_per_rank=per_rank))
    info, passed_over = solo(tmp_path).find_latest_valid()
    assert info is not None
    assert info.step == 1
    assert passed_over[0].status.startswith("damaged: MANIFEST.json does not name all files of each rank")


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(solo(tmp_path), 1)

    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UsageError, match=f"{re.escape(str(tmp_path))}: cannot be read"):
        find_checkpoints(tmp_path)
    with pytest.raises(UsageError, match=f"{re.escape(str(tmp_path))}: cannot be read"):
        find_latest_complete(tmp_path)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run prunes step 1 after it has saved step 3."""
    save(solo(tmp_path), 1, 2)
    inspect = manifest.inspect_checkpoint

    def prune(path: Path, check_hashes: bool = False) -> Any:
        if path.name == "step-00000001":
            monkeypatch.setattr(manifest, "inspect_checkpoint", inspect)
            save(solo(tmp_path, keep=2), 3)
        return inspect(path, check_hashes)

    monkeypatch.setattr(manifest, "inspect_checkpoint", prune)
    assert [(info.step, info.status) for info in find_checkpoints(tmp_path)] == [(3, "whole"), (2, "whole")]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(solo(tmp_path), 1)
    inspect, folder = manifest.inspect_checkpoint, tmp_path / "step-00000001"

    def rename(path: Path, check_hashes: bool = False) -> Any:
        monkeypatch.setattr(manifest, "inspect_checkpoint", inspect)
        folder.rename(tmp_path / "moved")
        info = inspect(path, check_hashes)
        (tmp_path / "moved").rename(folder)
        return info

    monkeypatch.setattr(manifest, "inspect_checkpoint", rename)
    assert [(info.step, info.status) for info in find_checkpoints(tmp_path)] == [(1, "whole")]


def test_a_hundred_million_steps_are_newer_than_one_less(tmp_path: Path) -> None:
    save(solo(tmp_path), 99_999_999, 100_000_000)
    assert steps(tmp_path) == [100_000_000, 99_999_999]


def test_a_copy_under_another_name_with_a_file_that_someone_added_is_whole(tmp_path: Path) -> None:
    save(solo(tmp_path), 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "copy")
    assert inspect_checkpoint(tmp_path / "copy", check_hashes=True).is_complete
    (tmp_path / "step-00000001" / "notes.txt").write_text("a good one")
    assert inspect_checkpoint(tmp_path / "step-00000001", check_hashes=True).is_complete


def test_the_newest_are_kept_and_the_multiples_and_the_best(tmp_path: Path) -> None:
    checkpoints = solo(tmp_path, keep=2, keep_every=40)
    for step in range(10, 110, 10):
        save(checkpoints, step, metric={30: 0.9}.get(step, 0.5), mode="max")
    assert steps(tmp_path) == [100, 90, 80, 40, 30]
    assert best(tmp_path) == "step-00000030"


def test_keeping_all_keeps_all(tmp_path: Path) -> None:
    save(solo(tmp_path, keep=None), *range(1, 8))
    assert len(steps(tmp_path)) == 7


def test_damaged_checkpoints_do_not_push_whole_ones_out(tmp_path: Path) -> None:
    checkpoints = solo(tmp_path, keep=2)
    save(checkpoints, 1, 2)
    _truncate(tmp_path / "step-00000002")
    save(checkpoints, 3)
    assert steps(tmp_path) == [3, 1]


def test_only_what_is_proven_to_be_a_whole_checkpoint_is_removed(tmp_path: Path) -> None:
    """A damaged one may be of use, and a folder with such a name may be of another program."""
    save(solo(tmp_path, keep=9), 2, 3, 4, 5)
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001/model.safetensors").touch()
    (tmp_path / "step-00000002/run.json").unlink()
    _truncate(tmp_path / "step-00000003")
    save(solo(tmp_path, keep=1), 6)
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (1, 2, 3, 6)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT, errno.EACCES])
def test_the_best_stays_where_it_cannot_be_read_for_a_moment(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, read, failed = solo(tmp_path, keep=1), manifest.read_limited, []
    save(kept, 1, metric=0.1)
    save(kept, 2, metric=0.2)

    def fail_once(path: Path, limit: int) -> bytes:
        if path == tmp_path / "step-00000001/run.json" and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        return read(path, limit)

    monkeypatch.setattr(manifest, "read_limited", fail_once)
    save(kept, 3, metric=0.3)
    assert failed
    assert 1 in steps(tmp_path)
    save(kept, 4, metric=0.4)
    assert (steps(tmp_path), best(tmp_path)) == ([4, 1], "step-00000001")


def test_the_best_stays_where_the_listing_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = solo(tmp_path, keep=1)
    save(kept, 1, metric=0.1)
    save(kept, 2, metric=0.2)
    monkeypatch.setattr(checkpoints_module, "list_checkpoint_names", lambda folder: [])
    save(kept, 3, metric=0.3)
    assert "does not have it yet" in kept.pop_events()[0][1]["why"]
    monkeypatch.undo()
    assert (steps(tmp_path), best(tmp_path)) == ([3, 2, 1], "step-00000001")


@pytest.mark.usefixtures("no_pause")
def test_a_checkpoint_counts_as_damaged_only_at_a_second_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(solo(tmp_path), 1, 2)
    look, looked = checkpoints_module.inspect_checkpoint, []

    def look_late(path: Path, *arguments: Any, **options: Any) -> Any:
        looked.append(path.name)
        if len(looked) > 1:
            return look(path, *arguments, **options)
        return make_damaged_info(path, "it cannot be read: [Errno 5] Input/output error", True)

    monkeypatch.setattr(checkpoints_module, "inspect_checkpoint", look_late)
    info, passed_over = solo(tmp_path).find_latest_valid()
    assert info is not None
    assert (info.step, passed_over, looked) == (2, [], ["step-00000002"] * 2)


def test_the_checkpoint_just_written_is_kept_beside_newer_ones(tmp_path: Path) -> None:
    checkpoints = solo(tmp_path, keep=1)
    save(checkpoints, 9)
    save(checkpoints, 5)
    assert steps(tmp_path) == [9, 5]


@pytest.mark.parametrize(("mode", "expected"), [("min", 2), ("max", 3)])
def test_best_points_to_the_best_metric_and_equals_do_not_move_it(tmp_path: Path, mode: Any, expected: int) -> None:
    checkpoints = solo(tmp_path, keep=1)
    for step, metric in enumerate([0.5, 0.1, 0.9, 0.1, 0.9, float("nan"), None], start=1):
        save(checkpoints, step, metric=metric, mode=mode)
    assert best(tmp_path) == f"step-{expected:08d}"
    assert steps(tmp_path) == [7, expected]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = solo(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 1, by=lambda folder: {"other": write_hashed_file(folder / "other", b"new")})
    assert steps(tmp_path) == [1]
    assert not (tmp_path / "step-00000001" / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_an_older_partial_left_does_not_get_in(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.partial").mkdir(parents=True)
    (tmp_path / "step-00000001.partial" / "stale.bin").touch()
    save(solo(tmp_path), 1)
    assert not (tmp_path / "step-00000001" / "stale.bin").exists()


def write_shard(world: ThreadWorld) -> Callable[[Path], dict[str, FileEntry]]:
    def act(folder: Path) -> dict[str, FileEntry]:
        name = f"rank-{world.rank:05d}.dat"
        return {name: write_hashed_file(folder / name, b"x" * (world.rank + 1))}

    return act


def test_every_rank_writes_and_all_agree_on_the_newest(tmp_path: Path) -> None:
    def act(world: ThreadWorld) -> Any:
        checkpoints = CheckpointStore(folder=tmp_path, world=world)
        save(checkpoints, 1, 2, by=write_shard(world))
        world.barrier()
        if world.rank == 0:
            (tmp_path / "step-00000002" / "rank-00002.dat").write_bytes(b"abc"[::-1])
        world.barrier()
        return checkpoints.find_latest_valid()

    results = on_ranks(3, act)
    assert all(result == results[0] for result in results)
    info, passed_over = results[0]  # type: ignore[misc]
    assert (info.step, info.world_size) == (1, 3)
    assert "rank-00002.dat is not what was written" in passed_over[0].status
    assert json.loads((info.path / "MANIFEST.json").read_text())["files_per_rank"] == [1, 1, 1]


def test_the_cleanup_waits_until_every_rank_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It renames `step-N.old`, whose manifest a slower rank had not read yet; no rank goes on before it is done."""
    save(solo(tmp_path), 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.old")
    (tmp_path / "step-00000002.partial").mkdir()

    def read_late(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name.endswith("_1"):
            time.sleep(0.3)
        return inspect_checkpoint(*args, **options)

    def act(world: ThreadWorld) -> Any:
        checkpoints = CheckpointStore(folder=tmp_path, world=world)
        found, _ = checkpoints.find_latest_valid()
        assert found is not None
        return found.step, checkpoints.remove_incomplete(), os.listdir(tmp_path)

    monkeypatch.setattr("dstrain.training.checkpoints.inspect_checkpoint", read_late)
    assert on_ranks(2, act) == [(1, ["step-00000002.partial"], ["step-00000001"])] * 2


@pytest.mark.parametrize("phase", ["write", "finalize_checkpoint", "_commit"])
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def act(world: ThreadWorld) -> None:
        checkpoints = CheckpointStore(folder=tmp_path, world=world)
        save(checkpoints, 1, by=write_shard(world))
        if phase != "write" and world.rank == 0:
            monkeypatch.setattr(f"dstrain.training.checkpoints.{phase}", full)
        world.barrier()
        save(checkpoints, 2, by=full if phase == "write" and world.rank == 1 else write_shard(world))

    errors = on_ranks(3, act)
    assert {type(error) for error in errors} == {CheckpointError}
    assert all("No space left on device" in str(error) for error in errors)
    if phase == "write":
        assert all("failed on 1 of 3 ranks (rank 1: OSError" in str(error) for error in errors)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert steps(tmp_path) == [1]


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.training.checkpoints.RETRY_SECONDS", 0)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOENT, errno.EAGAIN, errno.ETIMEDOUT])
def test_an_error_that_may_pass_is_tried_again_by_all_ranks_in_another_folder(number: int, tmp_path: Path) -> None:
    def act(world: ThreadWorld) -> Any:
        folders: list[str] = []

        def write_late(folder: Path) -> dict[str, FileEntry]:
            folders.append(folder.name)
            if world.rank == 1 and len(folders) == 1:
                raise OSError(number, os.strerror(number))
            return write_shard(world)(folder)

        checkpoints = CheckpointStore(folder=tmp_path, world=world)
        save(checkpoints, 1, by=write_late)
        return folders, checkpoints.pop_events()

    told = on_ranks(3, act)
    assert [folders for folders, _ in told] == [["step-00000001.partial", "step-00000001.retry.partial"]] * 3
    ((event, fields),) = told[0][1]
    assert (event, told[1][1], told[2][1]) == ("save_retried", [], [])
    assert fields["why"].startswith("writing step-00000001 failed on 1 of 3 ranks (rank 1: ")
    assert fields["why"].endswith(f"{os.strerror(number)})")
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert steps(tmp_path) == [1]


@pytest.mark.usefixtures("no_pause")
def test_an_error_in_both_tries_ends_all_ranks_and_leaves_the_older_ones(tmp_path: Path) -> None:
    def stale(folder: Path) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    save(solo(tmp_path), 1)
    with pytest.raises(
        CheckpointError, match=r"^in two tries: writing step-00000002 failed on 1 of 1 ranks .*unchanged"
    ):
        save(solo(tmp_path), 2, by=stale)
    assert os.listdir(tmp_path) == ["step-00000001"]


@pytest.mark.usefixtures("no_pause")
def test_what_a_first_try_leaves_is_removed_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, remove = solo(tmp_path), shutil.rmtree

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            remove(path)

    def fail_once(folder: Path) -> dict[str, FileEntry]:
        if folder.suffixes == [".partial"]:
            (folder / "half").touch()
            monkeypatch.setattr(shutil, "rmtree", refuse)
            raise OSError(errno.ESTALE, "Stale file handle")
        return write(folder)

    save(kept, 1, by=fail_once)
    monkeypatch.setattr(shutil, "rmtree", remove)
    save(kept, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


@pytest.mark.usefixtures("no_pause")
def test_a_replaced_checkpoint_has_its_name_again_where_its_successor_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(solo(tmp_path), 1, metric=1.0)
    rename = os.rename

    def fail(path: Path, target: Path) -> None:
        if Path(path).suffix == ".partial":
            raise OSError(errno.EACCES, "Permission denied")
        rename(path, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match="committing step-00000001 failed"):
        save(solo(tmp_path), 1, metric=2.0)
    assert sorted(os.listdir(tmp_path)) == ["best", "step-00000001"]
    assert find_checkpoints(tmp_path)[0].metric == 1.0


@pytest.mark.parametrize("name", ["sync_folder", "link_best", "list_folder", "remove_checkpoint", "_remove_incomplete"])
def test_an_error_behind_the_rename_ends_nothing_and_the_next_save_removes_what_was_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = solo(tmp_path, keep=1)
    save(kept, 1, metric=0.5)
    commit = checkpoints_module._commit

    def commit_and_fail(partial: Path, final: Path) -> None:
        def fail(*_: Any) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        commit(partial, final)
        monkeypatch.setattr(checkpoints_module, name, fail)

    monkeypatch.setattr(checkpoints_module, "_commit", commit_and_fail)
    save(kept, 2, metric=0.4)
    monkeypatch.undo()
    assert kept.pop_events() == [
        ("cleanup_failed", {"checkpoint": "step-00000002", "why": "OSError: [Errno 116] Stale file handle"})
    ]
    assert steps(tmp_path) == [2, 1]
    save(kept, 3, metric=0.3)
    assert steps(tmp_path) == [3]
    assert best(tmp_path) == "step-00000003"
    assert kept.pop_events() == []


class Killed(BaseException):
    """Stands for a kill -9: nothing catches it."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Dies in place of the k-th call that changes or syncs the disk."""
    left = [10**9]

    def countdown(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **options)

        return call

    for place, name in [(os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")]:
        monkeypatch.setattr(place, name, countdown(getattr(place, name)))
    return lambda k: left.__setitem__(0, k)


@pytest.mark.parametrize("again", [2, 3], ids=["replacing", "adding"])
def test_a_kill_between_any_two_changes_leaves_a_whole_one(
    tmp_path: Path, kill_at: Callable[[int], None], again: int
) -> None:
    for k in range(1000):
        folder = tmp_path / str(k)
        checkpoints = solo(folder, keep=1)
        save(checkpoints, 1, 2, metric=0.5)
        kill_at(k)
        try:
            save(checkpoints, again, metric=0.4)
            killed = False
        except Killed:
            killed = True
        kill_at(10**9)
        info, passed_over = solo(folder).find_latest_valid()
        assert info is not None, k
        assert info.step in (2, again), k
        assert passed_over == [], k
        assert all(listing.is_complete for listing in find_checkpoints(folder)), k
        checkpoints.remove_incomplete()
        assert (folder / best(folder) / "MANIFEST.json").exists(), k
        assert not list(folder.glob("*.*")), k
        save(checkpoints, again + 1, metric=0.3)
        assert steps(folder) == [again + 1], k
        if not killed:
            assert k > 15
            return


SAVE_FOR_EVER = """
import sys
import threading
from pathlib import Path
from dstrain.batch import Progress
from dstrain.training.state.manifest import write_hashed_file
from dstrain.training.checkpoints import CheckpointStore

class OneRank:
    rank, size, device = 0, 1, None
    def gather(self, value):
        return [value]

def write(folder):
    return {name: write_hashed_file(folder / name, bytes([rank]) * 200_000) for rank, name in enumerate("abcd")}

checkpoints = CheckpointStore(folder=Path(sys.argv[1]), world=OneRank(), keep=2)
checkpoints.remove_incomplete()
newest, passed_over = checkpoints.find_latest_valid()
assert not passed_over, passed_over
step = newest.step if newest else 0
assert "torch" not in sys.modules
while True:
    step += 1
    for _ in range(2):  # the second replaces the first
        checkpoints.save(write, Progress(step, step), {}, metric=1 / step)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_what_was_saved_last(tmp_path: Path) -> None:
    root, rng, told = str(Path(dstrain.__file__).parents[1]), random.Random(0), 0
    for _ in range(5):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.stdout.close()
        process.wait()
        told = max(told, *(int(line) for line in lines if line.endswith(b"\n")))
        info, passed_over = solo(tmp_path).find_latest_valid()
        assert info is not None
        assert info.step >= told > 0
        assert passed_over == []


def test_going_back_behind_the_best_chooses_another(tmp_path: Path) -> None:
    checkpoints = solo(tmp_path, keep=9)
    for step, metric in ((1, 0.5), (2, 0.4), (3, 0.1)):
        save(checkpoints, step, metric=metric)
    (start,) = (info for info in find_checkpoints(checkpoints.folder) if info.step == 2)
    assert checkpoints.supersede_newer(start) == ["step-00000003"]
    assert best(tmp_path) == "step-00000002"
    save(checkpoints, 3)
    assert best(tmp_path) == "step-00000002", "the third was not looked at again"


def test_metrics_of_another_name_are_not_compared(tmp_path: Path) -> None:
    """The run went on with `eval.metric: accuracy`: a loss of 1.2 is no better accuracy than 0.8."""
    for step, name, metric in ((1, "loss", 1.2), (2, "accuracy", 0.8)):
        save(solo(tmp_path), step, metric=metric, metric_name=name, mode="min" if name == "loss" else "max")
        assert best(tmp_path) == f"step-{step:08d}"


def test_a_launch_that_lost_its_folder_neither_writes_nor_removes_anything_there(tmp_path: Path) -> None:
    save(solo(tmp_path), 2)
    partial = tmp_path / "step-00000003.partial"
    partial.mkdir()
    (partial / "of the other launch").touch()

    def taken() -> None:
        raise RunFolderLockedError("another launch took the folder")

    lost = replace(solo(tmp_path), check_owner=taken)
    with pytest.raises(RunFolderLockedError, match=r"^another launch took the folder$"):
        save(lost, 3)
    assert [path.name for path in partial.iterdir()] == ["of the other launch"]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    change(manifest)
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def set_version(folder: Path, number: int | None) -> None:
    """Let another version of dstrain have written the checkpoint."""
    rewrite(folder, lambda manifest: manifest.update(format=number) if number else manifest.pop("format"))


def test_another_version_is_no_damage(tmp_path: Path) -> None:
    save(solo(tmp_path, keep=9), 1, 2, 3, 4)
    set_version(tmp_path / "step-00000004", MANIFEST_FORMAT + 1)
    set_version(tmp_path / "step-00000003", 1)
    (tmp_path / "step-00000003/run.json").write_text('{"versions": {"dstrain": "0.0.7"}}')
    set_version(tmp_path / "step-00000002", None)
    found = find_checkpoints(tmp_path)
    assert [info.status for info in found] == [
        f"of a later version of dstrain (format {MANIFEST_FORMAT + 1}), which this one does not read; that one does",
        "of an earlier version of dstrain (format 1), which this one does not read; dstrain 0.0.7, which wrote it, does",
        "of an earlier version of dstrain (format without a number), which this one does not read; that one does",
        "whole",
    ]
    assert [info.is_of_other_version for info in found] == [True, True, True, False]
    assert solo(tmp_path).find_latest_valid()[0].step == 1  # type: ignore[union-attr]
    rewrite(tmp_path / "step-00000003", lambda manifest: manifest.update(format="new", files={}))
    assert find_checkpoints(tmp_path)[1].status == "damaged: MANIFEST.json has the format 'new'"
    (tmp_path / "step-00000003/MANIFEST.json").write_text("{}")
    assert find_checkpoints(tmp_path)[1].status == "damaged: MANIFEST.json has the format None"


@pytest.mark.parametrize("number", [None, 1, MANIFEST_FORMAT + 1])
def test_another_versions_checkpoints_are_never_removed(number: int | None, tmp_path: Path) -> None:
    kept = solo(tmp_path, keep=1)
    save(kept, 1, 2)
    save(kept, 3)
    set_version(tmp_path / "step-00000003", number)
    save(kept, 4, 5)
    assert steps(tmp_path) == [5]
    kept.supersede_newer(replace(find_checkpoints(tmp_path)[0], step=2))
    save(kept, 3, 4, 5)
    assert superseded(tmp_path) == ["00000003"]
    assert steps(tmp_path) == [5]


def test_a_damaged_checkpoint_has_its_size(tmp_path: Path) -> None:
    save(solo(tmp_path), 1)
    (tmp_path / "step-00000001/rank-00000.dat").write_bytes(b"abc")
    there = sum(path.stat().st_size for path in (tmp_path / "step-00000001").rglob("*") if path.is_file())
    assert find_checkpoints(tmp_path)[0].size == there > 1000


def test_what_the_user_keeps_there_is_left_alone(tmp_path: Path) -> None:
    for name in ("notes.old", "notes.partial", "superseded-mine", "step-1.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000001.partial").mkdir()
    kept = solo(tmp_path)
    assert kept.remove_incomplete() == ["step-00000001.partial"]
    save(kept, 1)
    assert {"notes.old", "notes.partial", "superseded-mine", "step-1.old"} < {path.name for path in tmp_path.iterdir()}


def superseded(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-step-")[2] for path in folder.glob("superseded-*"))


def test_what_was_set_aside_goes_once_its_step_is_saved_again(tmp_path: Path) -> None:
    kept = solo(tmp_path, keep=2)
    save(kept, 10, 20, 30)
    kept.supersede_newer(find_checkpoints(tmp_path)[1])
    assert superseded(tmp_path) == ["00000030"]
    save(kept, 25)
    assert superseded(tmp_path) == ["00000030"]
    save(kept, 30)
    assert superseded(tmp_path) == []
    assert steps(tmp_path) == [30, 25]


def test_keeping_all_keeps_what_was_set_aside(tmp_path: Path) -> None:
    kept = solo(tmp_path, keep=None)
    save(kept, 10, 20)
    kept.supersede_newer(find_checkpoints(tmp_path)[1])
    save(kept, 20)
    assert superseded(tmp_path) == ["00000020"]


@pytest.mark.parametrize("options", [{"keep": None}, {"keep": 3, "keep_every": 1}])
def test_a_save_reads_no_more_manifests_the_more_there_are(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, read = solo(tmp_path, **options), []
    save(kept, *range(1, 40), metric=0.5)
    monkeypatch.setattr(
        "dstrain.training.checkpoints.inspect_checkpoint",
        lambda path: read.append(path) or inspect_checkpoint(path),
    )
    monkeypatch.setattr(
        manifest, "inspect_checkpoint", lambda path, all=False: read.append(path) or inspect_checkpoint(path)
    )
    save(kept, 40, metric=0.4)
    assert best(tmp_path) == "step-00000040"
    assert len(read) <= 3 + 3


@pytest.mark.parametrize("target", ["best", "step-00000099", "/etc"])
def test_best_is_put_right_wherever_it_leads(tmp_path: Path, target: str) -> None:
    kept = solo(tmp_path)
    save(kept, 1, metric=0.5)
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to(target)
    save(kept, 2, metric=0.6)
    assert best(tmp_path) == "step-00000001"


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_folder_in_place_of_the_link_is_neither_read_nor_removed(is_whole: bool, tmp_path: Path) -> None:
    """`cp -rL` and zip make a second copy of the link."""
    save(solo(tmp_path), 1, metric=0.5)
    shutil.copytree(tmp_path / "best", tmp_path / "copy")
    (tmp_path / "best").unlink()
    os.rename(tmp_path / "copy", tmp_path / "best")
    if not is_whole:
        (tmp_path / "best/rank-00000.dat").unlink()
    before = sorted(path.relative_to(tmp_path / "best") for path in (tmp_path / "best").rglob("*"))
    save(solo(tmp_path), 2, metric=0.1)
    assert sorted(path.relative_to(tmp_path / "best") for path in (tmp_path / "best").rglob("*")) == before
    found = find_best(tmp_path)
    assert found is not None
    assert found.step == 2


def test_a_damaged_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    save(solo(tmp_path), 1, metric=0.1)
    save(solo(tmp_path), 2, metric=0.3)
    _truncate(tmp_path / "step-00000001")
    found = find_best(tmp_path)
    assert found is not None
    assert found.step == 2
