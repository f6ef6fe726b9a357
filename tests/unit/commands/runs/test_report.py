"""`dstrain report`: where the page goes, and what it never overwrites."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstrain.commands.runs import rewrite_report
from dstrain.launch.lease import Lease
from dstrain.launch.worker import LAUNCH_ID_ENV, record_end, record_start
from tests.run_folders import event, finished_run, started, train_row, write_run
from tests.vocabulary import invoke


def test_the_page_of_one_run_goes_into_its_folder(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    for _ in range(2):  # the second time over the first page
        result = invoke("report", folder)
        assert (result.exit_code, result.output) == (0, f"{folder / 'report.html'}\n")
    assert 'badge finished"' in (folder / "report.html").read_text()


def test_the_page_of_several_runs_goes_into_the_working_folder_or_where_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [finished_run(tmp_path / name, seed=index) for index, name in enumerate("ab")]
    monkeypatch.chdir(tmp_path)
    assert invoke("report", *folders).output == "report.html\n"
    assert invoke("report", *folders, "--to", "two.html").output == "two.html\n"
    for name in ("report.html", "two.html"):
        assert "recipe.seed" in (tmp_path / name).read_text()
    assert not (folders[0] / "report.html").exists()


def test_a_file_that_is_no_report_is_not_overwritten(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    (tmp_path / "mine.html").write_text("my work")
    result = invoke("report", folder, "--to", tmp_path / "mine.html")
    assert result.exit_code == 2
    assert "mine.html: already exists, and is no report; give another file with --to" in result.stderr
    assert (tmp_path / "mine.html").read_text() == "my work"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    for target in (tmp_path / "none" / "x.html", tmp_path):
        result = invoke("report", folder, "--to", target)
        assert result.exit_code == 2
        assert f"{target}: cannot be written" in result.stderr


def test_one_folder_among_several_that_is_no_run_is_named(tmp_path: Path) -> None:
    result = invoke("report", finished_run(tmp_path / "run"), tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}: is not a run folder" in result.stderr


def test_a_failed_launch_leaves_the_reason_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    with Lease(folder, "abc") as lease:
        lease.acquire()
        monkeypatch.setenv(LAUNCH_ID_ENV, "abc")
        record_start(folder, 0)
        record_end(folder, 0, 1, "the disk is full")
    rewrite_report(folder)
    text = (folder / "report.html").read_text()
    assert 'badge failed"' in text
    assert "Failed at step 1 of 100: the disk is full" in text


def test_a_launch_that_lost_its_folder_leaves_the_page_of_the_next_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    with Lease(folder) as lease:
        lease.acquire()
        rewrite_report(folder)
    assert not (folder / "report.html").exists()


def test_a_page_never_changes_how_a_launch_ends(tmp_path: Path) -> None:
    rewrite_report(tmp_path / "none")
    folder = write_run(tmp_path / "run", [], [event("started")])
    (folder / "report.html").mkdir()
    rewrite_report(folder)
    assert os.listdir(folder / "report.html") == []


def test_only_the_page_that_a_live_run_writes_again_reloads_itself(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    with Lease(folder) as lease:
        lease.acquire()
        invoke("report", folder)
        invoke("report", folder, "--to", tmp_path / "mine.html")
    for path, reloads in ((folder / "report.html", True), (tmp_path / "mine.html", False)):
        text = path.read_text()
        assert 'badge running"' in text
        assert ('id="live"' in text) == reloads
