"""The console: a table and a progress line on a terminal of any width, plain lines elsewhere."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dstrain
from dstrain.report.console import ConsoleSink, format_row
from dstrain.report.progress import ProgressLine, format_clock
from tests.run_folders import ROW

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A pseudo-terminal; a thread reads what is written to it."""

    def __init__(self, width: int) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self.resize(width)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, width: int) -> None:
        fcntl.ioctl(self.stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                self.text += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                return

    def wait_for(self, text: str, at_end: bool = False) -> None:
        deadline = time.monotonic() + 60
        while not (self.text.endswith(text) if at_end else text in self.text):
            assert time.monotonic() < deadline, (text, self.text[-2000:])
            time.sleep(0.01)

    def lines(self) -> list[str]:
        """Everything that was drawn, line by line and redraw by redraw, without control characters."""
        return [ESCAPE.sub("", line) for line in re.split(r"[\r\n]+", self.text)]

    def close(self) -> None:
        self.stream.close()
        self._reader.join(timeout=5)
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    made = Terminal(80)
    yield made
    made.close()


def test_a_row_is_one_plain_line() -> None:
    line = "step 120/1000  loss 0.6931  accuracy 0.512  lr 9.9e-06  grad 1.23  1234 tokens/s  0.41 s/step"
    assert format_row(ROW, 1000) == line
    assert format_row({"step": 5, "split": "eval", "loss": None}, 10) == "eval at step 5/10  loss None"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_everything_fits_a_terminal_of_any_width(width: int, terminal: Terminal) -> None:
    terminal.resize(width)
    console = ConsoleSink(1000, terminal.stream)
    for step in (118, 119, 120):
        console.end_step(step, 0.5)
        time.sleep(0.06)
    terminal.wait_for("120/1000")
    console.write(ROW)
    console.close()
    terminal.wait_for("0.6931")
    terminal.wait_for("\r\x1b[K", at_end=True)  # the progress line is removed
    assert max(map(len, terminal.lines())) < width
    for part, needs in (
        ("loss", 20),
        (" left", 20),
        ("─", 40),
        (" elapsed", 80),
        ("accuracy", 80),
        ("epoch", 80),
        ("tokens/s", 80),
    ):
        assert part in terminal.text or width < needs, part
    assert "\x1b[?25l" not in terminal.text, "a cursor that is never hidden is there after kill -9"


def test_the_line_moves_with_each_step_and_rows_and_evaluations_stay(terminal: Terminal) -> None:
    console = ConsoleSink(1000, terminal.stream)
    for step in (119, 120):
        console.end_step(step, 0.5)
        terminal.wait_for(f"{step}/1000")
    console.write(ROW)
    console.write(ROW | {"step": 130, "loss": 0.25})
    console.write({"step": 120, "split": "eval", "loss": 0.5})
    console.close()
    terminal.wait_for("eval at step 120/1000  loss 0.5")
    rows = [line.split() for line in terminal.lines()]
    header = next(row for row in rows if row[:2] == ["step", "loss"])
    assert ["120", "0.6931"] in [row[:2] for row in rows]
    assert ["130", "0.25"] in [row[:2] for row in rows]
    assert sum(row[:2] == header[:2] for row in rows) == 1, "one header for rows of the same columns"


def test_time_passes_on_the_line_during_a_long_step(terminal: Terminal) -> None:
    console = ConsoleSink(1000, terminal.stream)
    console.end_step(1, 0.0)
    deadline = time.monotonic() + 60
    while not re.search(r"0:(0[2-9]|[1-5]\d) elapsed", terminal.text):  # a second may be skipped
        assert time.monotonic() < deadline, terminal.text[-2000:]
        time.sleep(0.01)
    console.close()
    drawn = [line for line in terminal.lines() if " elapsed" in line]
    assert len(drawn) > 1
    assert all("1/1000" in line for line in drawn), "no step was taken"


def test_a_close_between_two_redraws_is_not_missed(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread would sleep for a whole interval, and `close` leave the line where it is."""
    console = ConsoleSink(1000, terminal.stream)

    class ClosedMeanwhile(threading.Event):
        clears = 0

        def clear(self) -> None:
            self.clears += 1
            if self.clears == 2:  # the first redraw is that of the step
                console._closed.set()
                self.set()
            super().clear()

    monkeypatch.setattr("dstrain.report.console.REDRAW_SECONDS", 600.0)
    monkeypatch.setattr(console, "_moved", ClosedMeanwhile())
    console.end_step(1, 0.0)
    assert console._ticker is not None
    console._ticker.join(20)
    assert not console._ticker.is_alive()


def test_a_terminal_that_is_resized_gets_lines_of_its_new_width(terminal: Terminal) -> None:
    console = ConsoleSink(1000, terminal.stream)
    console.end_step(1, 0.0)
    terminal.wait_for("1/1000")
    terminal.resize(30)
    for step in (2, 3):  # a line that is being drawn in this moment still has the old width
        console.end_step(step, 0.0)
        terminal.wait_for(f"{step}/1000")
    console.close()
    terminal.wait_for("\r\x1b[K", at_end=True)
    drawn = [line for line in terminal.lines() if "3/1000" in line]
    assert drawn
    assert max(map(len, drawn)) < 30


def print_row(terminal: Terminal) -> None:
    """Print a row on the terminal, under a progress line."""
    console = ConsoleSink(1000, terminal.stream)
    console.end_step(120, 0.5)
    console.write(ROW)
    console.close()


def test_a_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    print_row(terminal)
    terminal.wait_for("\n")
    assert terminal.text.replace("\r", "") == format_row(ROW, 1000) + "\n"


def test_no_color_means_none(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    print_row(terminal)
    terminal.wait_for("0.6931")
    assert set(ESCAPE.findall(terminal.text)) == {"\x1b[K"}


def test_a_terminal_that_takes_no_output_does_not_hold_up_steps(terminal: Terminal) -> None:
    console = ConsoleSink(10**6, terminal.stream)
    attributes = termios.tcgetattr(terminal.stream.fileno())
    termios.tcflow(terminal.stream.fileno(), termios.TCOOFF)  # Ctrl-S
    begin = time.monotonic()
    for step in range(1, 200):
        console.end_step(step, 0.0)
        time.sleep(0.001)
    assert time.monotonic() - begin < 5
    termios.tcflow(terminal.stream.fileno(), termios.TCOON)
    terminal.wait_for("199/1000000")
    console.close()
    assert termios.tcgetattr(terminal.stream.fileno()) == attributes


def test_lines_without_a_terminal_tell_the_epoch_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stream = [100.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = ConsoleSink(1000, stream)
    for step in (119, 120):
        now[0] += 2.0
        console.end_step(step, 0.5)
    console.write(ROW)
    console.write({"step": 120, "split": "eval", "loss": 0.5})
    console.close()
    assert stream.getvalue().splitlines() == [
        format_row(ROW, 1000) + "  epoch 0.5  29 m 20 s left",
        "eval at step 120/1000  loss 0.5",
    ]


def test_the_time_left_is_that_of_the_mean_step_after_the_first() -> None:
    line = ProgressLine(10)
    line.advance(1, 0.1, now=60.0)  # the first step takes a minute
    assert line.seconds_left(60.0) is None
    assert "-:-- left" in line.render(80, 60.0)
    line.advance(2, 0.2, now=62.0)
    line.advance(3, 0.3, now=64.0)
    assert line.seconds_left(64.0) == 14.0
    assert line.seconds_left(65.0) == 13.0
    assert line.render(80, 65.0, use_color=False).endswith("epoch 0.30  0:05 elapsed  0:13 left")
    line.advance(10, 1.0, now=80.0)
    assert line.seconds_left(80.0) == 0.0
    assert "100%" in line.render(80, 80.0)


def test_a_clock_has_hours_where_it_needs_them() -> None:
    assert [format_clock(seconds) for seconds in (5, 65, 3725, None)] == ["0:05", "1:05", "1:02:05", "-:--"]


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
    script = "from dstrain.report.console import ConsoleSink\nfor i in range(20000): ConsoleSink(9).write({'step': i})"
    root = str(Path(dstrain.__file__).parents[1])
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr and process.stderr.read()) == (0, b"")


def test_memory_is_in_the_line_where_it_is_asked_for() -> None:
    row = {"step": 1, "split": "train", "loss": 0.5, "resident_memory_gib": 2.125, "available_memory_gib": 60.0}
    row |= {"allocated_memory_gib": 10.25, "peak_memory_gib": 11.5}
    plain, with_memory = io.StringIO(), io.StringIO()
    ConsoleSink(4, plain).write(row)
    ConsoleSink(4, with_memory, show_memory=True).write(row)
    assert plain.getvalue() == "step 1/4  loss 0.5\n"
    assert with_memory.getvalue() == "step 1/4  loss 0.5  GPU 10.2 GiB, at most 11.5  host 2.12 GiB, 60 free\n"
