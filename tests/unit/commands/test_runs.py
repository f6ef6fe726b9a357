"""`dstrain status`: alive, dead, finished, and what it says of each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.runs import find_liveness, rewrite_report
from dstrain.launch import lease
from dstrain.launch.lease import Lease, lease_path
from dstrain.launch.worker import LAUNCH_ID_ENV, record_end, record_start
from dstrain.report.run_history import open_run
from tests.run_folders import event, finished_run, started, train_row, write_run
from tests.vocabulary import invoke


def read_status(folder: Path) -> dict[str, Any]:
    result = invoke("status", folder, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def now(seconds: float = 0.0, base: float | None = None) -> str:
    """Return the time in `seconds`; `base`: one present for several times, which then differ exactly."""
    present = time.time() if base is None else base
    return (
        datetime.fromtimestamp(round(present, 3) + seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def live_run(folder: Path) -> Path:
    base = time.time()
    rows = [train_row(step, time=now(step - 10, base), accuracy=0.5, tokens_per_second=1234.0) for step in range(1, 11)]
    return write_run(folder, rows, [started(time=now(-10, base), steps=70)])


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder that this process holds, with two ranks: this process, and one that has ended."""
    folder = live_run(tmp_path / "run")
    monkeypatch.setattr("dstrain.launch.lease.HEARTBEAT_SECONDS", 600.0)  # tests change the file themselves
    with Lease(folder, "abc") as lease:
        lease.acquire()
        monkeypatch.setenv(LAUNCH_ID_ENV, "abc")
        record_start(folder, 0)
        record_start(folder, 1)
        record_end(folder, 1, 0)
        yield folder


def test_a_live_run_is_reported_as_running(held: Path) -> None:
    found = read_status(held)
    assert found["state"] == "running"
    assert (found["step"], found["total_steps"], found["is_late"]) == (10, 70, False)
    assert found["seconds_per_step"] == pytest.approx(1)
    assert found["seconds_left"] == pytest.approx(60, abs=5)
    assert found["launch"]["pid"] == os.getpid()
    assert found["launch"]["alive_ranks"] == [0]
    assert [one["exit"] for one in found["launch"]["ranks"]] == [None, 0]
    text = invoke("status", held).output
    for words in ("state:      running", "step:       10 of 70 (14 %), epoch 0.1", "1.23 k tokens/s", "loss 0.8187, accuracy 0.5", "in about"):  # fmt: skip
        assert words in text, words


def test_a_run_before_its_first_row_is_starting(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Lease(folder) as lease:
        lease.acquire()
        assert read_status(folder)["state"] == "starting"


def test_a_live_run_without_new_rows_is_late(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", [train_row(step, time=now(step - 500)) for step in (1, 2, 3)], [started(time=now(-500))]
    )
    with Lease(folder) as lease:
        lease.acquire()
        assert read_status(folder)["is_late"]
        ends = re.search(r"ends: .*", invoke("status", folder).output)
        assert ends is not None
        assert re.fullmatch(r"ends: +overdue: the last row is 8 m \d\d s old", ends[0])
        assert re.search(r"running; no row or event for 8 m \d\d s, see logs/", invoke("status", folder).output)


def test_a_launch_that_was_killed_is_dead(tmp_path: Path) -> None:
    folder = live_run(tmp_path / "run")
    code = f"import os; from pathlib import Path; from dstrain.launch.lease import Lease; Lease(Path({str(folder)!r})).acquire(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    found = read_status(folder)
    assert found["state"] == "killed"
    assert found["seconds_left"] is None
    assert "dead: its processes ended without a report" in invoke("status", folder).output


def test_a_finished_run_needs_no_lease(tmp_path: Path) -> None:
    found = read_status(finished_run(tmp_path / "run"))
    assert (found["state"], found["step"], found["launch"]) == ("finished", 100, None)
    assert found["last_eval"]["accuracy"] == 0.7
    assert found["last_event"]["event"] == "finished"
    assert found["last_checkpoint"] is None
    assert found["seconds_left"] is None


def test_a_failed_rank_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = live_run(tmp_path / "run")
    with Lease(folder, "abc") as lease:
        lease.acquire()
        monkeypatch.setenv(LAUNCH_ID_ENV, "abc")
        record_start(folder, 0)
        record_end(folder, 0, 1, "disk is full\nmore")
    found = read_status(folder)
    assert (found["state"], found["reason"]) == ("failed", "disk is full\nmore")
    assert "state:      failed: disk is full\n" in invoke("status", folder).output


def test_an_event_gives_the_reason_where_no_rank_does(tmp_path: Path) -> None:
    found = read_status(write_run(tmp_path / "run", [], [started(), event("failed", what="why")]))
    assert (found["state"], found["reason"]) == ("failed", "why")


def test_a_run_without_a_lease_and_an_end_is_unknown(tmp_path: Path) -> None:
    assert read_status(live_run(tmp_path / "run"))["state"] == "unknown"


def test_a_copy_of_the_folder_of_a_live_run_is_not_alive(held: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", held, tmp_path / "copy"], check=True)
    assert read_status(tmp_path / "copy")["state"] == "unknown"


@pytest.mark.parametrize("beats", [True, False])
def test_a_launch_on_another_host_is_alive_while_its_heartbeat_changes(
    held: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    path = lease_path(held)
    elsewhere = json.loads(path.read_text()) | {"machine": "elsewhere", "host": "node7"}
    path.write_text(json.dumps(elsewhere))
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.01)
    if beats:
        read = iter(range(1, 100))
        monkeypatch.setattr(
            lease,
            "read_lease",
            lambda folder: json.dumps(elsewhere | {"beat": f"{next(read):012d}"}).encode(),
        )
    found = find_liveness(open_run(held), timeout=0.3)
    assert found.state == ("running" if beats else "killed")
    assert found.alive_ranks is None, "its processes cannot be looked up here"


def test_hostile_text_stays_on_its_line(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", [train_row(1)], [started(), event("warning", what="a\x1b[2J\nstate: finished")]
    )
    lines = invoke("status", folder).output.splitlines()
    assert len([line for line in lines if line.startswith("state:")]) == 1
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_folder_that_is_no_run_ends_with_2(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        result = invoke(command, path)
        assert result.exit_code == 2
        assert str(path) in result.stderr


def test_status_answers_without_torch(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    code = f"""
import sys
from click.testing import CliRunner
from dstrain.cli import main
for words in (["status", {str(folder)!r}], ["report", {str(folder)!r}]):
    assert CliRunner().invoke(main, words).exit_code == 0
assert not {{"torch", "deepspeed", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# `dstrain report`: where the page goes, and what it never overwrites.


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
