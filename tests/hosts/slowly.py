"""Reward-model task with slow steps, so that faults happen between two steps; it records its samples."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.batch import Batch
from dstrain.tasks.common.task import Loss
from dstrain.tasks.rm import RewardModel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Slowly(RewardModel):
    """A reward model that is in no hurry."""

    folder: str
    """Where the file `pace` may say how many seconds a step takes, and `seen-0` gets the samples of rank 0's steps."""

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        if model.training:
            self._take_time(batch)
        return super().loss(model, batch)

    def _take_time(self, batch: Batch) -> None:
        with (Path(self.folder) / f"seen-{os.environ['RANK']}").open("a") as seen:
            seen.write(f"{batch.samples}\n")
        pace = Path(self.folder) / "pace"
        with contextlib.suppress(FileNotFoundError):  # removed by a test that wants the rest at full speed
            time.sleep(float(pace.read_text()))
