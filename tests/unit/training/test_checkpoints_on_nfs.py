"""Checkpoints on file systems that have less than a local disk, or keep what others have open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import CheckpointError
from dstrain.training import checkpoints
from dstrain.training.checkpoints import remove_checkpoint, select_checkpoint
from dstrain.training.run_dir import replace_folder
from tests.unit.training.test_checkpoints import save, solo, steps


def refuse(code: int) -> Callable[..., None]:
    def fault(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fault


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_without_symbolic_links_the_best_is_found_and_kept(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "symlink", refuse(code))
    kept, folder = solo(tmp_path / "checkpoints", keep=2), tmp_path / "checkpoints"
    save(kept, 1, metric=0.3)
    for step in (2, 3, 4):
        save(kept, step, metric=0.5)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000003", "step-00000004"]
    assert select_checkpoint(tmp_path, "best").step == 1
    save(kept, 5, metric=0.1)
    assert select_checkpoint(tmp_path, "best").step == 5


@pytest.mark.parametrize(
    ("selector", "file"),
    [("best", "1/run.json"), ("best", "1/MANIFEST.json"), ("last", "3/MANIFEST.json"), ("3", "3/MANIFEST.json")],
)
def test_a_checkpoint_that_cannot_be_read_now_is_never_replaced_by_another(
    selector: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened = solo(tmp_path / "checkpoints"), os.open
    for step in (1, 2, 3):
        save(kept, step, metric=step)

    def open_or_fail(path: Any, *more: Any, **options: Any) -> int:
        if os.fspath(path).endswith(f"step-0000000{file}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
        return opened(path, *more, **options)

    monkeypatch.setattr(os, "open", open_or_fail)
    with pytest.raises(CheckpointError, match=rf"0{file[0]} cannot be read now, and it may be the one; try again"):
        select_checkpoint(tmp_path, selector)
    assert select_checkpoint(tmp_path, "2").step == 2


def test_an_index_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone reads the index, while the others wait for its answer."""
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.0)
    kept, attempts = solo(tmp_path / "checkpoints"), list[Path]()
    save(kept, 1)
    save(kept, 2)

    def fail_once(path: Path) -> str:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return ""

    kept.find_index_fault = fail_once
    latest, passed_over = kept.find_latest_valid()
    assert latest is not None
    assert (latest.step, passed_over, len(attempts)) == (2, [], 2)


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, folder = solo(tmp_path / "checkpoints", keep=3), tmp_path / "checkpoints"
    save(kept, 1)
    save(kept, 2)
    inspected, failed = checkpoints.inspect_checkpoint, list[Path]()

    def inspect_or_fail(path: Path, *more: Any, **options: Any) -> Any:
        if path.name == "step-00000001" and not failed:
            failed.append(path)
            return checkpoints.make_damaged_info(path, "it cannot be read", is_transient=True)
        return inspected(path, *more, **options)

    monkeypatch.setattr(checkpoints, "inspect_checkpoint", inspect_or_fail)
    save(kept, 3)
    assert failed
    assert steps(folder) == [3, 2, 1]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each rank-00000.dat is open in another process of this host: NFS keeps it as a file that nobody can remove."""
    unlink = os.unlink

    def silly(path: Any, *, dir_fd: int | None = None) -> None:
        name = os.path.basename(os.fspath(path))
        if name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if name == "rank-00000.dat":
            os.rename(path, f"{os.fspath(path)[: -len(name)]}.nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            return
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", silly)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("held")
def test_what_a_reader_holds_open_keeps_no_start_from_going_on(tmp_path: Path) -> None:
    kept = solo(tmp_path, keep=1)
    save(kept, 1, 2)
    assert steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.glob("*.partial")] == ["step-00000001.partial"]
    assert kept.remove_incomplete() == []
    assert kept.remove_incomplete() == []


@pytest.mark.usefixtures("held")
def test_what_a_reader_holds_open_keeps_no_step_from_being_saved_again(tmp_path: Path) -> None:
    kept = solo(tmp_path, keep=5)
    for _ in range(3):
        save(kept, 1)
    assert steps(tmp_path) == [1]
    for _ in range(2):
        remove_checkpoint(tmp_path / "step-00000001")
        save(kept, 1)
    assert steps(tmp_path) == [1]


def test_what_was_held_open_goes_once_nobody_holds_it(
    held: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = solo(tmp_path, keep=5)
    for _ in range(3):
        save(kept, 1)
    monkeypatch.undo()
    assert len(kept.remove_incomplete()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.usefixtures("held")
def test_a_folder_that_a_reader_holds_open_is_replaced(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "rank-00000.dat").write_bytes(b"")

    for _ in range(3):
        replace_folder(tmp_path / "tokenizer", make)
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == ["rank-00000.dat"]


def test_a_rename_that_was_done_and_reported_as_a_fault_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def answered_twice(source: Any, target: Any, **more: Any) -> None:
        rename(source, target, **more)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "rename", answered_twice)
    kept = solo(tmp_path, keep=1)
    save(kept, 1, 1, 2)
    assert steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_rename_of_what_is_not_there_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(solo(tmp_path), 1)
    monkeypatch.setattr(os, "rename", refuse(errno.ENOENT))
    monkeypatch.setattr("dstrain.training.checkpoints.RETRY_SECONDS", 0)
    with pytest.raises(CheckpointError, match="committing step-00000002 failed"):
        save(solo(tmp_path), 2)
    assert steps(tmp_path) == [1]
