"""The run folder: shared by all, and named where it is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.config.schema import BatchConfig
from dstrain.errors import UsageError
from dstrain.train.resume import with_saved_batch_total
from dstrain.train.setup.run_dir import check_run_dir_shared, check_run_dir_writable
from tests.unit.distributed.thread_world import on_ranks


def test_a_shared_folder_passes_and_stays_clean(tmp_path: Path) -> None:
    assert on_ranks(3, lambda world: check_run_dir_shared(tmp_path, world)) == [None, None, None]
    assert not list(tmp_path.iterdir())


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
    start: Any = SimpleNamespace(read_run_info=lambda: {"batch_total": 12})
    found = with_saved_batch_total(BatchConfig(**batch), start, [])
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert with_saved_batch_total(BatchConfig(**batch), start, ["batch.total"]) == BatchConfig(**batch)
    assert with_saved_batch_total(BatchConfig(**batch), None, []) == BatchConfig(**batch)


def test_a_run_folder_without_inodes_is_refused_with_what_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\); free some .* inodes"):
        check_run_dir_writable(tmp_path)
