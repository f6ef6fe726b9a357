"""Status requests never hang and never raise, whatever the file system does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.distributed.world import SingleProcessWorld
from dstrain.train.health.diagnosis import Diagnosis, RankStatusBoard, call_with_timeout


class Two(SingleProcessWorld):
    """A world of two whose other rank is a stranger's process, or one that never says anything."""

    def __init__(self, other: tuple[str, str, int]) -> None:
        super().__init__(torch.device("cpu"))
        self.size, self._other = 2, other

    def gather(self, value: Any) -> list[Any]:
        return [value, self._other if isinstance(value, tuple) else None]


def test_a_rank_of_another_host_that_says_nothing_is_waited_for_and_named(tmp_path: Path) -> None:
    roll = RankStatusBoard(tmp_path, Two(("far", "far 1", os.getpid())))
    start = time.monotonic()
    verdict = roll.request_diagnosis("Timed out", timeout=0.5)
    assert 0.4 < time.monotonic() - start < 3
    assert verdict.ranks == (1,)
    assert verdict.message.startswith("rank 1 on far went silent")


def test_a_folder_that_is_gone_costs_the_name_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    roll = RankStatusBoard(folder, Two(("far", "far 1", 1)))
    for path in (folder / ".workers").iterdir():
        path.unlink()
    (folder / ".workers").rmdir()
    roll.answer_request()
    roll.sign_off("failed", "no")
    assert "another process has ended or does not answer (Timed out)" in roll.request_diagnosis("Timed out").message


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roll = RankStatusBoard(tmp_path, Two(("far", "far 1", 1)))
    monkeypatch.setattr(roll, "_request_status", lambda *_: threading.Event().wait())
    monkeypatch.setattr("dstrain.train.health.diagnosis.STATUS_TIMEOUT_SECONDS", 0.2)
    start = time.monotonic()
    assert isinstance(roll.request_diagnosis("Timed out", timeout=0.2), Diagnosis)
    assert time.monotonic() - start < 3


def test_what_takes_too_long_or_fails_gives_the_other_value() -> None:
    assert call_with_timeout(lambda: 1 // 0, 7, 60.0) == 7
    assert call_with_timeout(lambda: threading.Event().wait() and 1, 7, 0.1) == 7
    assert call_with_timeout(lambda: 3, 7, 60.0) == 3


def test_only_this_launchs_files_are_kept(tmp_path: Path) -> None:
    first = RankStatusBoard(tmp_path, Two(("far", "far 1", 1)))
    first.sign_off("failed", "of the first launch")
    second = RankStatusBoard(tmp_path, Two(("far", "far 1", 1)))
    assert "first launch" not in second.request_diagnosis("Timed out", timeout=0.2).message
    assert len({path.name.split("-")[1] for path in (tmp_path / ".workers").iterdir()}) == 1
