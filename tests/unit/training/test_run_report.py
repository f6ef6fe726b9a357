"""The live page: written by a thread, at most so often, and never worth a run."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest

from dstrain.files import partial_path
from dstrain.training import run_report
from dstrain.training.run_report import REPORT_FILE, ReportSink
from tests.run_folders import event, started, train_row, write_run
from tests.vocabulary import write_jsonl


def wait_for(path: Path, words: str) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists() and words in (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} never had {words!r}")


def test_the_first_row_gives_a_page_and_the_end_the_last_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    sink = ReportSink(folder, interval=1000)
    assert not (folder / REPORT_FILE).exists()
    sink.write(train_row(1))
    live = wait_for(folder / REPORT_FILE, 'badge running"')
    assert 'http-equiv="refresh"' in live
    write_jsonl(folder / "metrics.jsonl", [train_row(1), train_row(2)])
    write_jsonl(folder / "events.jsonl", [started(), event("finished", step=2)])
    start = time.monotonic()
    sink.close(0)
    assert time.monotonic() - start < 10, "the interval is not waited for"
    last = (folder / REPORT_FILE).read_text()
    assert 'badge finished"' in last
    assert 'http-equiv="refresh"' not in last


def test_pages_are_no_more_frequent_than_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = write_run(tmp_path / "run", [train_row(1)], [started()]), []
    monkeypatch.setattr(run_report, "write_page", lambda runs, path: written.append(threading.current_thread().name))
    sink = ReportSink(folder, interval=0.5)
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        sink.write(train_row(1))
        time.sleep(0.01)
    sink.close()
    assert 2 <= len(written) <= 5
    assert set(written) == {"report"}, "never on the thread of the training"


def test_a_slow_page_waits_longer_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, written = write_run(tmp_path / "run", [train_row(1)], [started()]), []

    def write(runs: object, path: Path) -> None:
        written.append(path)
        time.sleep(0.05)

    monkeypatch.setattr(run_report, "write_page", write)
    sink = ReportSink(folder, interval=0)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        sink.write(train_row(1))
        time.sleep(0.01)
    assert len(written) == 1, "the next one is due after 5 s"
    sink.close()


@pytest.mark.parametrize("step", ["folder", "error"])
def test_a_page_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    if step == "folder":
        (folder / REPORT_FILE).mkdir()
    else:
        monkeypatch.setattr(run_report, "render_page", lambda *_: 1 / 0)
    sink = ReportSink(folder, interval=0.01)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            sink.write(train_row(1))
            time.sleep(0.01)
        sink.close()
    (record,) = caplog.records
    assert f"{folder / REPORT_FILE} cannot be written" in record.getMessage()
    assert "the run continues without it" in record.getMessage()


def test_without_a_thread_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sink = ReportSink(write_run(tmp_path / "run", [train_row(1)], [started()]))
    with caplog.at_level(logging.WARNING):
        sink.write(train_row(1))
        sink.write(train_row(2))
        sink.close()
    assert len(caplog.records) == 1


def test_a_file_system_that_hangs_keeps_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(run_report, "write_page", lambda runs, path: released.wait(60))
    monkeypatch.setattr(run_report, "CLOSE_TIMEOUT_SECONDS", 0.2)
    sink = ReportSink(write_run(tmp_path / "run", [train_row(1)], [started()]))
    start = time.monotonic()
    sink.write(train_row(1))
    assert time.monotonic() - start < 10, "not the minute that the page takes"
    sink.close()
    assert time.monotonic() - start < 20
    released.set()


@pytest.mark.parametrize(("code", "events", "badge"), [(0, ["finished"], "finished"), (75, ["stopped"], "stopped"), (1, ["failed"], "failed"), (1, [], "failed"), (75, [], "stopped")])  # fmt: skip
def test_the_last_page_says_how_the_run_ended(tmp_path: Path, code: int, events: list[str], badge: str) -> None:
    folder = write_run(tmp_path / "run", [], [started(), *map(event, events)])
    ReportSink(folder).close(code)
    assert f'badge {badge}"' in (folder / REPORT_FILE).read_text(), "also of a run that ended before its first row"


def test_a_part_of_a_page_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], [started()])
    stale = partial_path(folder / REPORT_FILE)
    stale = stale.with_name(stale.name.replace(f"-{os.getpid()}-", "-4194304-"))
    stale.write_text("half")
    ReportSink(folder).close()
    assert [path.name for path in folder.glob("report*")] == [REPORT_FILE]
