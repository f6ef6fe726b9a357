"""The run folder: shared by all, and named where it is not."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.config.schema import BatchConfig
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import UsageError
from dstrain.training.run_dir import (
    archive_previous_run,
    check_run_dir_shared,
    check_run_dir_writable,
    discard_run_dir,
)
from dstrain.training.start import ResumeOptions, with_saved_batch_total
from tests.unit.distributed.thread_world import on_ranks


def test_a_shared_folder_passes_and_stays_clean(tmp_path: Path) -> None:
    assert on_ranks(3, lambda world: check_run_dir_shared(tmp_path, world)) == [None, None, None]
    assert not list(tmp_path.iterdir())


def test_a_refused_start_removes_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs/rank-00000.log").touch()
        (tmp_path / name / "events.jsonl").touch()
    (tmp_path / "second/notes.txt").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/data.jsonl").touch()
    (tmp_path / "second/model").symlink_to(tmp_path / "elsewhere")
    discard_run_dir(tmp_path / "first")
    discard_run_dir(tmp_path / "second")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "elsewhere", "elsewhere/data.jsonl", "second", "second/notes.txt"
    ]  # fmt: skip


def test_ranks_that_see_another_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folders = [tmp_path, tmp_path, tmp_path / "elsewhere"]
    for told in on_ranks(3, lambda world: check_run_dir_shared(folders[world.rank], world)):
        assert isinstance(told, UsageError)
        assert "ranks 2 do not see what rank 0 writes there" in str(told)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        ({"micro": 2, "accumulate": 3}, {"total": 12, "micro": 2, "accumulate": None}),
        ({"total": 12, "micro": 2, "accumulate": 3}, {"total": 12, "micro": 2, "accumulate": None}),
        ({"total": 12, "micro": 2}, {"total": 12, "micro": 2, "accumulate": None}),
        ({"total": 12, "accumulate": 3}, {"total": 12, "micro": None, "accumulate": 3}),
        ({}, {"total": 12, "micro": None, "accumulate": None}),
    ],
)
def test_the_total_stays_whatever_the_processes_are(batch: dict[str, int], wanted: dict[str, int | None]) -> None:
    start: Any = SimpleNamespace(run_info={"batch_total": 12})
    found = with_saved_batch_total(BatchConfig(**batch), start, [])
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert with_saved_batch_total(BatchConfig(**batch), start, ["batch.total"]) == BatchConfig(**batch)


WRITTEN = (
    "metrics.jsonl", "events.jsonl", "recipe.yaml", "report.html", "task.py", "model/config.json", "logs/rank-00000.log",
    "logs/stacks/rank-00000.txt", "logs/host-a.log", ".workers/lease.json", ".workers/rank-00000.json", "wandb/id",
    "profile/flops.txt", "logs", "logs/stacks", ".workers", "model", "tokenizer", "wandb", "profile", "exports", ".previous",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_link_or_a_fifo_at_a_name_that_a_run_writes_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=rf"{re.escape(str(path))} is (a link to|not a)"):
        check_run_dir_writable(run)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(UsageError, match=r"logs is not a folder; remove it, or choose another run folder"):
        check_run_dir_writable(tmp_path)


def test_the_run_folder_and_its_checkpoints_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "disk/checkpoints").mkdir(parents=True)
    (tmp_path / "bigger").mkdir()
    (tmp_path / "disk/checkpoints").rmdir()
    (tmp_path / "disk/checkpoints").symlink_to(tmp_path / "bigger")
    (tmp_path / "disk/notes.txt").symlink_to("nowhere")  # of the user: a run does not write it
    (tmp_path / "run").symlink_to("disk")
    check_run_dir_writable(tmp_path / "run")


def test_a_run_folder_without_inodes_is_refused_with_what_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\); free some .* inodes"):
        check_run_dir_writable(tmp_path)


# `--resume never` moves an earlier run out of the way, also where it is interrupted or the run lies on two disks.


FILES = ("recipe.yaml", "metrics.jsonl", "events.jsonl")


def begun(run: Path) -> None:
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / ".workers").mkdir()
    for name in FILES:
        (run / name).write_text(name)


@pytest.mark.parametrize("then", ["never", "auto"])
@pytest.mark.parametrize("at", range(5))
def test_an_interrupted_move_is_finished_by_the_next_start(
    at: int, then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    rename, left = os.rename, [None] * at

    def killed(*arguments: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        rename(*arguments)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        archive_previous_run(tmp_path, ResumeOptions("never"), SingleProcessWorld())
    monkeypatch.setattr(os, "rename", rename)
    if at == 0 and then == "auto":  # the run is whole: it goes on
        archive_previous_run(tmp_path, ResumeOptions(then), SingleProcessWorld())
        assert (tmp_path / "checkpoints/step-00000001").is_dir()
        assert all((tmp_path / name).is_file() for name in FILES)
        return
    archive_previous_run(tmp_path, ResumeOptions(then), SingleProcessWorld())
    assert {path.name for path in tmp_path.iterdir()} == {".workers", "previous-1"}
    assert {path.name for path in (tmp_path / "previous-1").iterdir()} == {"checkpoints", *FILES}


def test_a_run_that_began_after_an_interrupted_move_is_kept_apart(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / ".previous").mkdir()
    (tmp_path / "checkpoints").rename(tmp_path / ".previous/checkpoints")
    (tmp_path / "checkpoints/step-00000007").mkdir(parents=True)
    archive_previous_run(tmp_path, ResumeOptions("auto"), SingleProcessWorld())
    assert (tmp_path / "checkpoints/step-00000007").is_dir()
    archive_previous_run(tmp_path, ResumeOptions("never"), SingleProcessWorld())
    assert (tmp_path / "previous-1/checkpoints/step-00000001").is_dir()
    assert (tmp_path / "previous-2/checkpoints/step-00000007").is_dir()


@pytest.mark.parametrize("absolute", [True, False])
def test_checkpoints_on_another_disk_are_found_from_where_the_link_is_moved(absolute: bool, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    begun(run)
    (run / "checkpoints").rename(disk)
    (run / "checkpoints").symlink_to(disk if absolute else "../disk")
    archive_previous_run(run, ResumeOptions("never"), SingleProcessWorld())
    assert (run / "previous-1/checkpoints/step-00000001").is_dir()
    assert not os.path.lexists(run / "checkpoints")
