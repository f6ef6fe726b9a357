"""`--resume never` moves an earlier run out of the way, also where it is interrupted or the run lies on two disks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dstrain.distributed.world import SingleProcessWorld
from dstrain.train.resume import ResumeOptions
from dstrain.train.setup.run_dir import archive_previous_run

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
