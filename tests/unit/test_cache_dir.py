"""The cache is where the environment says, and forgets a file that has changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dstrain import cache_dir
from dstrain.cache_dir import cache_root, file_digest, file_state, load_file_result, save_file_result
from dstrain.errors import DataError


def test_the_cache_is_below_the_usual_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    assert cache_root() == Path("/var/x/dstrain")


def test_without_a_home_folder_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", "~nobody-has-this-name/cache")
    with pytest.raises(DataError, match=r"no home folder is known; set DSTRAIN_CACHE to an absolute path"):
        cache_root()


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_dir, "RACY_WINDOW_NS", -(10**12))  # the file is as young as this test
    (file := tmp_path / "a.jsonl").write_text("one")
    first = file_digest(file)
    assert load_file_result(file, "sha256") == first == file_digest(file)
    file.write_text("another")
    assert load_file_result(file, "sha256") is None
    assert file_digest(file) != first


def test_a_file_that_changed_while_it_was_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    (file := tmp_path / "a").write_text("one")
    state = file_state(file)
    os.utime(file, (1, 1))
    save_file_result(file, "x", 1, time.time_ns(), state)
    assert load_file_result(file, "x") is None
