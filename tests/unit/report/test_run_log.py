"""metrics.jsonl and events.jsonl."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import RunError
from dstrain.report import run_log
from dstrain.report.run_log import RunLog, read_rows


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_row_is_ordered_as_promised(tmp_path: Path) -> None:
    journal = RunLog(tmp_path)
    journal.log_metrics(
        {"step_seconds": 1.0, "margin": 2.0, "lr": 0.1, "accuracy": 0.5, "loss": 1.0, "split": "train", "step": 1}
    )
    [row] = rows(tmp_path / "metrics.jsonl")
    assert list(row) == ["time", "step", "split", "loss", "margin", "accuracy", "lr", "step_seconds"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["time"])


def test_a_row_can_be_read_before_the_journal_is_closed(tmp_path: Path) -> None:
    journal = RunLog(tmp_path)
    journal.log_metrics({"step": 1})
    assert rows(tmp_path / "metrics.jsonl")[0]["step"] == 1


def test_what_is_not_finite_is_null_at_any_depth(tmp_path: Path) -> None:
    journal = RunLog(tmp_path)
    journal.log_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("-inf")})
    journal.log_event("warning", values=[1.0, {"x": float("inf")}])
    assert rows(tmp_path / "metrics.jsonl")[0] | {"time": ""} == {
        "time": "",
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }
    assert rows(tmp_path / "events.jsonl")[0]["values"] == [1.0, {"x": None}]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3, "lo\n', b"\x00\x00\x00", b'"half'])
def test_a_line_torn_by_a_kill_is_cut_off_on_opening(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    RunLog(tmp_path).log_metrics({"step": 3})
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


@pytest.mark.parametrize("end", [b"", b"\0\0\0"])
def test_a_whole_last_row_without_its_line_break_stays(end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}' + end)
    RunLog(tmp_path).log_metrics({"step": 3})
    assert [row["step"] for row in rows(path)] == [1, 2, 3]
    assert not list(tmp_path.glob("*.damaged-*"))


def pretty(content: bytes) -> bytes:
    return b"\n".join(json.dumps(json.loads(line), indent=2).encode() for line in content.splitlines()) + b"\n"


WRITTEN_AGAIN: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "by jq": (pretty, 0),
    "gzip": (gzip.compress, 0),
    "UTF-16": (lambda content: content.decode().encode("utf-16"), 0),
    "UTF-16 BE without a mark": (lambda content: content.decode().encode("utf-16-be"), 0),
    "a JSON array": (lambda content: b"[" + b",\n".join(content.splitlines()) + b"]\n", 0),
    "a JSON array on one line": (lambda content: b"[" + b",".join(content.splitlines()) + b"]", 0),
    "a note at the end": (lambda content: content + b"# best lr so far, keep!\n", 2),
    "a note without a line break": (lambda content: content + b"# keep!", 2),
    "a merge conflict": (lambda content: b"<<<<<<< HEAD\n" + content + b"=======\n" + content + b">>>>>>> x\n", 4),
    "a byte order mark": (lambda content: b"\xef\xbb\xbf" + content, 2),
    "a line that is too long": (lambda content: content + b'{"step": 2, "x": "' + b"x" * 200 + b'"}\n', 2),
}
"""What another program or person made of the file -> the rows in it that can be read."""


@pytest.mark.parametrize("change", WRITTEN_AGAIN)
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_file_that_is_not_rows_is_set_aside_and_its_rows_are_copied(
    change: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_log, "MAX_LINE_BYTES", 100)
    write, count = WRITTEN_AGAIN[change]
    content = write(b'{"step": 1, "event": "a"}\n{"step": 2, "event": "b"}\n')
    (tmp_path / name).write_bytes(content)
    journal = RunLog(tmp_path)
    assert journal.truncate_after(2) == 0
    [kept] = tmp_path.glob(f"{name}.damaged-*")
    assert kept.read_bytes() == content
    [event] = [row for row in rows(tmp_path / "events.jsonl") if row["event"] == "file_set_aside"]
    assert (event["file"], event["kept_as"], event["rows"]) == (name, kept.name, count)
    assert len([row for row in rows(tmp_path / name) if "step" in row]) == count
    assert f"it is kept as {kept.name}, and its {count} rows were copied" in capsys.readouterr().out


def test_a_second_writer_of_the_events_repairs_nothing(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "st')
    RunLog(tmp_path, repairs=False).close()
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"event": "st'


def test_a_file_of_nothing_but_a_torn_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"event": "st')
    RunLog(tmp_path).log_event("start")
    assert [row["event"] for row in rows(tmp_path / "events.jsonl")] == ["start"]


def test_cutting_back_drops_later_rows_and_no_events(tmp_path: Path) -> None:
    journal = RunLog(tmp_path)
    for step in range(1, 6):
        journal.log_metrics({"step": step})
        journal.log_event("saved", step=step)
    assert journal.truncate_after(3) == 2
    journal.log_metrics({"step": 4})
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(rows(tmp_path / "events.jsonl")) == 5
    assert not list(tmp_path.glob("*.partial"))


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    journal = RunLog(tmp_path / "run", rank=1)
    journal.log_metrics({"step": 1})
    journal.log_event("start")
    assert journal.truncate_after(0) == 0
    journal.close()
    assert not (tmp_path / "run").exists()


def test_a_file_name_that_is_not_utf8_can_be_told(tmp_path: Path) -> None:
    name = b"caf\xe9 \xc3\xa9".decode("utf-8", "surrogateescape")
    RunLog(tmp_path).log_event("skipped", file=name)
    assert rows(tmp_path / "events.jsonl")[0]["file"] == name


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    journal = RunLog(tmp_path)
    full = pytest.raises(RunError, match=r"cannot write .*metrics.jsonl: No space left on device; free some .* inodes")
    with Path("/dev/full").open("ab", buffering=0) as journal._metrics._file, full:
        journal.log_metrics({"step": 1})


def test_a_disk_that_fails_where_rows_are_cut_back_is_named_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = RunLog(tmp_path, 0)
    for step in (1, 2):
        journal.log_metrics({"step": step})
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: Input/output error; the disk or network"):
        journal.truncate_after(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match=rf"cannot write .*/{name}: Is a directory; it must be a writable file"):
        RunLog(tmp_path)


def test_a_disk_that_fails_at_fsync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RunLog(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(run_log, "RETRY_SECONDS", 0)
    with pytest.raises(RunError, match=r"cannot write .*/events\.jsonl: Input/output error; the disk or network"):
        journal.log_event("saved")


def test_a_damaged_row_before_the_kept_ones_stays_and_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \xff}\n{"step": 2}\n{"step": 3}\n')
    journal = RunLog(tmp_path)
    assert journal.truncate_after(2) == 1
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert journal.truncate_after(2) == 0


@pytest.mark.parametrize(
    "row", ['{"step": "x"}', '{"step": null}', '{"step": true}', '{"step": NaN}', "[" * 5000, "7", "\udcff", "\0"]
)
@pytest.mark.parametrize("later", ["", '{"step": 9}\n'])
def test_damaged_rows_after_the_kept_ones_are_removed(row: str, later: str, tmp_path: Path) -> None:
    text = '{"step": 1}\n{"step": 2}\n' + f"{row}\n{later}{row}\n"
    (tmp_path / "metrics.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    RunLog(tmp_path).truncate_after(2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("step", range(13))
def test_rows_are_cut_back_wherever_a_block_of_the_file_ends(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "READ_BYTES", 7 + step)
    journal = RunLog(tmp_path)
    for number in range(1, 13):
        journal.log_metrics({"step": number, "text": "\n" * number})
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert journal.truncate_after(step) == 12 - step
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:step])
    journal.log_metrics({"step": 99})
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [*range(1, step + 1), 99]


def test_a_long_file_is_cut_back_with_little_memory(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "text": "x" * 1000}).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(line * 20_000 + b'{"step": 2}\n')
    tracemalloc.start()
    try:
        assert RunLog(tmp_path).truncate_after(1) == 1
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_row_after_a_pause_asks_whether_the_folder_is_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that stood still while another one took its folder over writes nothing more."""
    now, asked = [0.0], list[float]()

    def check_owner() -> None:
        asked.append(now[0])
        if now[0] > 30:
            raise RunError("another launch took it over")

    monkeypatch.setattr(run_log.time, "clock_gettime", lambda clock: now[0])
    with contextlib.closing(RunLog(tmp_path, check_owner=check_owner)) as journal:
        for now[0] in (1.0, 2.0, 12.0, 13.0):
            journal.log_metrics({"step": int(now[0])})
        now[0] = 40.0
        for write in (lambda: journal.log_metrics({"step": 40}), lambda: journal.log_event("saved")):
            with pytest.raises(RunError, match="took it over"):
                write()
    assert asked == [12.0, 40.0, 40.0]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 12, 13]
    assert read_rows(tmp_path / "events.jsonl") == []


def test_an_error_that_passes_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, failed = RunLog(tmp_path), list[str]()
    sync = os.fsync

    def fail_once(descriptor: int) -> None:
        if not failed:
            failed.append("fsync")
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        sync(descriptor)

    monkeypatch.setattr(run_log, "RETRY_SECONDS", 0)
    monkeypatch.setattr(os, "fsync", fail_once)
    journal.log_event("saved", step=1)
    assert failed
    assert [row["event"] for row in read_rows(tmp_path / "events.jsonl")] == ["saved"]
