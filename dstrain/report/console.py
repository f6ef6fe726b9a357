"""Console sink: a table of rows and a progress line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from dstrain.report.progress import (
    EVAL_PREFIX,
    ProgressLine,
    TableLayout,
    choose_columns,
    format_number,
    format_table_row,
)
from dstrain.report.run_log import Row, task_metric_names
from dstrain.units import format_duration

CLEAR_LINE = "\r\x1b[K"
"""Return to the first column and clear the line: control characters of every terminal but a dumb one."""
REDRAW_SECONDS = 1.0
"""Interval at which the progress line is drawn again, so that the elapsed time moves during long steps."""
LEAST_REDRAW_SECONDS = 0.05
"""Shortest interval: steps may be faster than a terminal."""
ROWS_PER_HEADER = 20
"""Rows of the table after which its header is printed again."""
DEFAULT_WIDTH = 80


class ConsoleSink:
    """Sink that prints one line per row; on a terminal the rows form a table above a progress line.

    The cursor is never hidden and no line is reserved, so that a process that is killed leaves a usable terminal, and
    output of other processes between two redraws does no harm.
    """

    def __init__(self, total_steps: int, stream: TextIO | None = None, show_memory: bool = False) -> None:
        """`show_memory`: add memory to the lines of training rows."""
        self._total_steps, self._stream, self._show_memory = total_steps, stream or sys.stdout, show_memory
        self._is_silent = False
        self._progress = ProgressLine(total_steps)
        self._layout, self._rows_below_header = TableLayout(()), 0
        self._lock, self._closed, self._moved = threading.Lock(), threading.Event(), threading.Event()
        self._ticker: threading.Thread | None = None

    def end_step(self, step: int, epoch: float) -> None:
        """Move the progress line to a step that was taken.

        Does not wait for a terminal that takes no output (Ctrl-S): a thread draws the line.
        """
        self._progress.advance(step, epoch, time.monotonic())
        if self._ticker is None and not self._is_silent:
            with self._quiet_if_closed():
                self._start_timer()
        self._moved.set()

    def write(self, row: Row) -> None:
        with self._lock, self._quiet_if_closed():
            if self._is_silent:
                return
            if not self._is_terminal():
                self._print(self._format_plain(row))
            elif row.get("split") == "eval":
                self._print(CLEAR_LINE + format_row(row, self._total_steps))
                self._rows_below_header += 1
            else:
                self._print_table_row(row)
            self._draw_line()

    def close(self, exit_code: int = 0) -> None:
        """Remove the progress line; the rows stay."""
        self._closed.set()
        self._moved.set()
        if self._ticker is None:
            return
        self._ticker.join(timeout=REDRAW_SECONDS)  # it may stand in a write to a terminal that takes no output
        if not self._ticker.is_alive() and not self._is_silent:
            with self._quiet_if_closed():
                self._stream.write(CLEAR_LINE)
                self._stream.flush()
        self._ticker = None

    def _is_terminal(self) -> bool:
        return self._stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")

    def _width(self) -> int:
        """Return the columns of the terminal now; it may have been resized."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_WIDTH
        except (OSError, ValueError):
            return DEFAULT_WIDTH

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _draw_line(self) -> None:
        """Draw the progress line if there is a terminal, and leave the cursor at its beginning."""
        if self._is_silent or self._closed.is_set() or not self._is_terminal():
            return
        self._start_timer()
        line = self._progress.render(self._width() - 1, time.monotonic(), use_color="NO_COLOR" not in os.environ)
        self._stream.write(f"{CLEAR_LINE}{line}\r")
        self._stream.flush()

    def _start_timer(self) -> None:
        if self._ticker is None and self._is_terminal():
            self._ticker = threading.Thread(target=self._refresh, name="progress-line", daemon=True)
            self._ticker.start()

    def _refresh(self) -> None:
        while True:
            self._moved.clear()
            if self._closed.is_set():  # read after the line above, which may take back what `close` has set
                return
            with self._lock, self._quiet_if_closed():
                self._draw_line()
            self._closed.wait(LEAST_REDRAW_SECONDS)
            self._moved.wait(REDRAW_SECONDS)

    def _print_table_row(self, row: Row) -> None:
        layout = choose_columns(row, self._total_steps, self._width() - 1, self._format_memory(row))
        lines = []
        if layout.names != self._layout.names or self._rows_below_header >= ROWS_PER_HEADER:
            self._rows_below_header = 0
            header = layout.header()
            lines.append(header if "NO_COLOR" in os.environ else f"\x1b[1m{header}\x1b[0m")
        self._layout, self._rows_below_header = layout, self._rows_below_header + 1
        lines.append(format_table_row(row, layout))
        self._print("\n".join(CLEAR_LINE + line for line in lines))

    def _format_plain(self, row: Row) -> str:
        """Return the line of a row for a log: with the epoch and the time left where they are known."""
        parts = [format_row(row, self._total_steps), *self._format_memory(row)]
        left = self._progress.seconds_left(time.monotonic())
        if row.get("split") != "eval" and left is not None:
            parts += [f"epoch {format_number(row['epoch'], '.3g')}"] if "epoch" in row else []
            parts += [f"{format_duration(left)} left"] if left > 0 else []
        return "  ".join(parts)

    def _format_memory(self, row: Row) -> list[str]:
        """Return `GPU 10.2 GiB, at most 11.3` and `host 2.1 GiB, 60 free` where they are asked for and measured."""
        parts = []
        if self._show_memory and "allocated_memory_gib" in row:
            parts.append(f"GPU {row['allocated_memory_gib']:.3g} GiB, at most {row['peak_memory_gib']:.3g}")
        if self._show_memory and "resident_memory_gib" in row:
            parts.append(f"host {row['resident_memory_gib']:.3g} GiB, {row['available_memory_gib']:.3g} free")
        return parts

    @contextlib.contextmanager
    def _quiet_if_closed(self) -> Iterator[None]:
        """Context that stops printing when the stream fails: `| head`, a closed terminal, a full disk."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._stream.closed:
                raise
            self._silence()

    def _silence(self) -> None:
        """Stop printing.

        Buffered output would fail again at exit and turn the exit code into 120, so the stream's file
        descriptor is redirected to the null device, as Python's own note on SIGPIPE does.
        """
        self._is_silent = True
        self._closed.set()
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def format_row(row: Row, total_steps: int) -> str:
    """Return a row as `step 120/1000  loss 0.6931  accuracy 0.512  lr 9.9e-06  grad 1.23  1234 tokens/s  0.41 s/step`."""
    begin = EVAL_PREFIX if row.get("split") == "eval" else "step"
    return "  ".join([f"{begin} {row['step']}/{total_steps}", *_format_fields(row)])


def _format_fields(row: Row) -> list[str]:
    """Return the main numbers of a row, each with its name or unit."""
    parts = [f"loss {format_number(row['loss'], '.4g')}"] if "loss" in row else []
    parts += [f"{name} {format_number(row[name], '.3g')}" for name in task_metric_names(row)]
    known: Mapping[str, tuple[str, str]] = {
        "lr": ("lr {}", ".3g"),
        "grad_norm": ("grad {}", ".3g"),
        "skipped": ("skipped {}", "d"),
        "tokens_per_second": ("{} tokens/s", ".0f"),
        "step_seconds": ("{} s/step", ".3g"),
    }
    return parts + [form.format(format_number(row[name], how)) for name, (form, how) in known.items() if name in row]
