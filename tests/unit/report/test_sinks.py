"""Where rows go."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

import dstrain
from dstrain.errors import UsageError
from dstrain.report.run_log import RunLog
from dstrain.report.sinks import ConsoleSink, RunLogSink, TensorBoardSink, check_tensorboard, format_row

ROW = {
    "step": 120,
    "samples": 7680,
    "epoch": 0.5,
    "split": "train",
    "loss": 0.69314,
    "accuracy": 0.5123,
    "lr": 9.9e-6,
    "grad_norm": 1.234,
    "tokens_per_second": 1234.4,
    "samples_per_second": 5.0,
    "step_seconds": 0.41,
    "peak_memory_gib": 3.0,
}


def test_a_row_is_one_plain_line() -> None:
    line = "step 120/1000  loss 0.6931  accuracy 0.512  lr 9.9e-06  grad 1.23  1234 tokens/s  0.41 s/step"
    assert format_row(ROW, 1000) == line
    assert format_row({"step": 5, "split": "eval", "loss": None}, 10) == "eval at step 5/10  loss None"


def test_without_a_terminal_each_row_is_printed() -> None:
    stream = io.StringIO()
    console = ConsoleSink(1000, stream)
    console.write(ROW)
    console.close()
    assert stream.getvalue() == format_row(ROW, 1000) + "\n"


def test_on_a_terminal_a_bar_shows_the_step_and_evaluations_stay() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        console = ConsoleSink(1000, stream)
        console.write(ROW)
        console.write({"step": 120, "split": "eval", "loss": 0.5})
        console.close()
        shown = ""
        while select.select([master], [], [], 2)[0] and "eval at" not in shown[:-40]:  # it comes in pieces
            shown += os.read(master, 65536).decode(errors="replace")
    os.close(master)
    assert "120/1000" in shown
    assert "eval at step 120/1000  loss 0.5" in shown
    assert sys.stdout is not None


def test_a_terminal_that_was_closed_does_not_stop_the_run() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        console = ConsoleSink(1000, stream)
        console.write(ROW)
        os.close(master)
        for _ in range(3):
            console.write(ROW)
        console.close()
        assert console._is_silent, "it noticed, and nothing was raised"


class Dead(io.StringIO):
    def __init__(self, error: int) -> None:
        super().__init__()
        self.error, self.calls = error, 0

    def write(self, text: str) -> int:
        self.calls += 1
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_dead_stream_makes_the_console_quiet(error: int) -> None:
    stream = Dead(error)
    console = ConsoleSink(1000, stream)
    console.write(ROW)
    console.write(ROW)
    console.close()
    assert stream.calls == 1


def test_a_closed_stream_makes_the_console_quiet() -> None:
    stream = io.StringIO()
    console = ConsoleSink(1000, stream)
    stream.close()
    console.write(ROW)
    assert console._is_silent


def test_a_reader_that_leaves_does_not_change_the_exit_code() -> None:
    script = "from dstrain.report.sinks import ConsoleSink\nfor i in range(20000): ConsoleSink(9).write({'step': i})"
    root = str(Path(dstrain.__file__).parents[1])
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr and process.stderr.read()) == (0, b"")


def test_jsonl_writes_to_the_journal_and_leaves_it_open_for_events(tmp_path: Path) -> None:
    journal = RunLog(tmp_path)
    sink = RunLogSink(journal)
    sink.write(ROW)
    sink.close()
    journal.log_event("finished")
    assert '"step": 120' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_holds_the_numbers_and_a_resume_purges_what_comes_again(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_at in (0, 1):
        sink = TensorBoardSink(tmp_path, resumed_at)
        for step in range(resumed_at + 1, 4):
            sink.write({"time": "now", "step": step, "split": "train", "loss": step + 10.0 * resumed_at, "x": None})
        sink.close()
    events = loader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 12.0), (3, 13.0)]
    assert events.Tags()["scalars"] == ["train/loss"]


def test_a_missing_tensorboard_is_refused_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        check_tensorboard()


def test_memory_is_in_the_line_where_it_is_asked_for() -> None:
    row = {"step": 1, "split": "train", "loss": 0.5, "resident_memory_gib": 2.125, "available_memory_gib": 60.0}
    row |= {"allocated_memory_gib": 10.25, "peak_memory_gib": 11.5}
    plain, with_memory = io.StringIO(), io.StringIO()
    ConsoleSink(4, plain).write(row)
    ConsoleSink(4, with_memory, show_memory=True).write(row)
    assert plain.getvalue() == "step 1/4  loss 0.5\n"
    assert with_memory.getvalue() == "step 1/4  loss 0.5  GPU 10.2 GiB, at most 11.5  host 2.12 GiB, 60 free\n"
