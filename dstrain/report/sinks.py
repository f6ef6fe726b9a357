"""Metric sinks: metrics.jsonl and TensorBoard, on rank 0 only."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from pathlib import Path
from typing import Any, Protocol

from dstrain.config.schema import LogConfig
from dstrain.errors import UsageError
from dstrain.report.run_log import Row, RunLog
from dstrain.report.wandb import check_wandb

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receiver of the rows of a run. One that becomes unavailable never stops the run."""

    def write(self, row: Row) -> None:
        """Write one row of training or evaluation metrics."""

    def close(self, exit_code: int = 0) -> None:
        """Flush and close; `exit_code` is that of the run."""


class StepDisplay(Protocol):
    """Receiver of every step, also of those without a row."""

    def end_step(self, step: int, epoch: float) -> None:
        """Show that a step was taken."""


class RunLogSink:
    """Sink that writes metrics.jsonl."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log

    def write(self, row: Row) -> None:
        self._run_log.log_metrics(row)

    def close(self, exit_code: int = 0) -> None:
        """Do nothing: the run closes its log itself, since events follow the last row."""


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
