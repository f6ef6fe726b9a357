"""Metric sinks: console, metrics.jsonl and TensorBoard, on rank 0 only."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from dstrain.config.schema import LogConfig
from dstrain.errors import UsageError
from dstrain.report.run_log import Row, RunLog, task_metric_names
from dstrain.report.wandb import check_wandb

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receiver of the rows of a run. One that becomes unavailable never stops the run."""

    def write(self, row: Row) -> None:
        """Write one row of training or evaluation metrics."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and close; `exit_code` is that of the run."""


class RunLogSink:
    """Sink that writes metrics.jsonl."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log

    def write(self, row: Row) -> None:
        self._run_log.log_metrics(row)

    def close(self, exit_code: int = 0) -> None:
        """Do nothing: the run closes its log itself, since events follow the last row."""


class ConsoleSink:
    """Sink that prints one line per row, or a progress bar on a terminal."""

    def __init__(self, total_steps: int, stream: TextIO | None = None, show_memory: bool = False) -> None:
        """`show_memory`: add memory to the lines of training rows."""
        self._total_steps, self._stream, self._show_memory = total_steps, stream or sys.stdout, show_memory
        self._is_silent = False
        self._progress_bar: Any = None

    def write(self, row: Row) -> None:
        if self._is_silent:
            return
        try:
            if self._stream.isatty():
                self._update_bar(row)
            else:
                print(
                    "  ".join([format_row(row, self._total_steps), *self._format_memory(row)]),
                    file=self._stream,
                    flush=True,
                )
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._stream.closed:
                raise
            self._silence()

    def close(self, exit_code: int = 0) -> None:
        if self._progress_bar is not None:
            with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
                self._progress_bar.stop()
            self._progress_bar = None

    def _update_bar(self, row: Row) -> None:
        if self._progress_bar is None:
            self._progress_bar = _make_progress_bar(self._stream)
            self._task = self._progress_bar.add_task("", total=self._total_steps, text="")
            self._progress_bar.start()
        if row.get("split") == "eval":
            self._progress_bar.console.print(format_row(row, self._total_steps), highlight=False)
        else:
            text = "  ".join([*_format_columns(row), *self._format_memory(row)])
            self._progress_bar.update(self._task, completed=row["step"], text=text, refresh=True)

    def _format_memory(self, row: Row) -> list[str]:
        """Return `GPU 10.2 GiB, at most 11.3` and `host 2.1 GiB, 60 free` where they are asked for and measured."""
        parts = []
        if self._show_memory and "allocated_memory_gib" in row:
            parts.append(f"GPU {row['allocated_memory_gib']:.3g} GiB, at most {row['peak_memory_gib']:.3g}")
        if self._show_memory and "resident_memory_gib" in row:
            parts.append(f"host {row['resident_memory_gib']:.3g} GiB, {row['available_memory_gib']:.3g} free")
        return parts

    def _silence(self) -> None:
        """Stop printing after the reader has gone (`| head`, a closed terminal, a full disk).

        Buffered output would fail again at exit and turn the exit code into 120, so the stream's file
        descriptor is redirected to the null device, as Python's own note on SIGPIPE does.
        """
        self._is_silent = True
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
        self.close()


class TensorBoardSink:
    """Sink that writes TensorBoard event files, with tags such as `train/loss`, and the recipe as text."""

    def __init__(self, log_dir: Path, start_step: int = 0, recipe_yaml: str = "") -> None:
        check_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run writes the steps after its checkpoint again (all of them without a checkpoint):
        # purge_step makes TensorBoard drop the earlier copies.
        self._writer: Any = SummaryWriter(log_dir=str(log_dir), purge_step=start_step + 1 if start_step else 0)
        if recipe_yaml:
            self._writer.add_text("recipe", "```yaml\n" + recipe_yaml + "\n```", start_step)

    def write(self, row: Row) -> None:
        if self._writer is None:
            return
        try:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name not in ("step", "samples"):
                    self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"])
            self._writer.flush()
        except OSError as error:
            log.warning("TensorBoard files cannot be written (%s); this run continues without them", error)
            self._writer = None

    def close(self, exit_code: int = 0) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk must not fail a run that has ended
                self._writer.close()


def check_tensorboard() -> None:
    """Raise UsageError if TensorBoard is not installed. Does not import it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "log.tensorboard is true, but tensorboard is not installed; "
            "run `pip install tensorboard`, or set log.tensorboard=false"
        )


def check_trackers(log_config: LogConfig) -> None:
    """Raise UsageError for trackers that cannot work on this host, which is that of rank 0."""
    if log_config.tensorboard:
        check_tensorboard()
    if log_config.wandb is not None:
        check_wandb(log_config.wandb)


def format_row(row: Row, total_steps: int) -> str:
    """Return a row as `step 120/1000  loss 0.6931  accuracy 0.512  lr 9.9e-06  grad 1.23  1234 tokens/s  0.41 s/step`."""
    begin = "eval at step" if row.get("split") == "eval" else "step"
    return "  ".join([f"{begin} {row['step']}/{total_steps}", *_format_columns(row)])


def _format_columns(row: Row) -> list[str]:
    """Return the main numbers of a row, each with its name or unit."""
    parts = [f"loss {_format_number(row['loss'], '.4g')}"] if "loss" in row else []
    parts += [f"{name} {_format_number(row[name], '.3g')}" for name in task_metric_names(row)]
    known: Mapping[str, tuple[str, str]] = {
        "lr": ("lr {}", ".3g"),
        "grad_norm": ("grad {}", ".3g"),
        "skipped": ("skipped {}", "d"),
        "tokens_per_second": ("{} tokens/s", ".0f"),
        "step_seconds": ("{} s/step", ".3g"),
    }
    return parts + [form.format(_format_number(row[name], how)) for name, (form, how) in known.items() if name in row]


def _format_number(value: Any, format_spec: str) -> str:
    return format(value, format_spec) if isinstance(value, (int, float)) else str(value)


def _make_progress_bar(stream: TextIO) -> Any:
    """Return a bar with the step, the time left and a text, drawn only for a new row."""
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # No auto refresh: rich's thread would raise on a closed terminal, where nothing catches it.
    return Progress(
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
        BarColumn(bar_width=10),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[text]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        expand=True,
        console=RichConsole(file=stream),
        auto_refresh=False,
    )
