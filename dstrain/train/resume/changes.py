"""Differences between a resumed run and its checkpoint, as events and messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dstrain.config import BatchPlan, RunConfig, find_learning_changes
from dstrain.schedule import LRSchedule, scale_lr
from dstrain.train.resume.inputs import iter_input_changes
from dstrain.train.resume.recorded import get_run_dir, read_recorded_recipe
from dstrain.train.state.manifest import CheckpointInfo

_SCHEDULE_KEYS = ("steps", "epochs", "optim")


class RunPlanValues(Protocol):
    """The values of a run plan that are compared with a checkpoint."""

    @property
    def config(self) -> RunConfig:
        """The recipe."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    def batch(self) -> BatchPlan:
        """Sizes of the batches."""


@dataclass(frozen=True)
class ResumeChange:
    """A difference that was allowed, or a warning."""

    event_name: str
    """`changed`, or `warning` for a difference that is not an allowed change."""
    event_fields: Mapping[str, Any]
    message: str
    """A line for the terminal."""


def iter_resume_changes(
    checkpoint: CheckpointInfo, run: RunPlanValues, inputs: Mapping[str, Any]
) -> Iterator[ResumeChange]:
    """Yield the allowed differences between the checkpoint's run and the planned one.

    `inputs` are the present digests, from `digest_inputs`.
    """
    before, at = read_recorded_recipe(checkpoint), f"from step {checkpoint.step} on"
    if get_run_dir(checkpoint) == run.run_dir and not (run.run_dir / "recipe.yaml").is_file():
        line = f"recipe.yaml is missing in {run.run_dir}; it is written again after a comparison with the checkpoint's recipe"
        yield ResumeChange("warning", {"what": line}, f"warning: {line}")
    found = find_learning_changes(before, run.config)
    for key, (old, new) in found.items():
        yield ResumeChange("changed", {"key": key, "before": old, "now": new}, f"{key}: {new!r} {at}, {old!r} before")
    recorded = checkpoint.read_run_info().get("inputs", {})
    for key, what in iter_input_changes(recorded, inputs):
        yield ResumeChange("changed", {"key": key, "what": what}, f"{key}: {at} {what}")
    old, new = (digests.get("data.eval", {}).get("path") for digests in (recorded, inputs))
    before_digest, now_digest = (digests.get("data.eval", {}).get("digest") for digests in (recorded, inputs))
    if recorded and old != new and before_digest != now_digest:
        line = (
            f"data.eval: {new} {at}, {old} before; "
            f"evaluation metrics before and after are not comparable, nor is `best`"
        )
        yield ResumeChange("changed", {"key": "data.eval", "before": old, "now": new}, line)
    if any(key.split(".")[0] in _SCHEDULE_KEYS for key in found):
        yield from _iter_lr_changes(checkpoint, before, run)


def _iter_lr_changes(checkpoint: CheckpointInfo, old_config: RunConfig, run: RunPlanValues) -> Iterator[ResumeChange]:
    """Yield the learning rate of the next step by the old schedule and by the new one."""
    steps = checkpoint.read_run_info().get("steps", run.steps)
    old, new = (
        LRSchedule(
            scale_lr(config.optim.peak_lr, config.optim.scale_lr, run.batch.total, config.optim.scale_lr_base),
            config.optim.schedule, total, config.optim.warmup,
        )(checkpoint.step)
        for config, total in ((old_config, steps), (run.config, run.steps))
    )  # fmt: skip
    line = (
        f"the learning rate follows the schedule of a run of {run.steps} steps from here on: "
        f"{new:.3g} at the next step, {old:.3g} by the old schedule"
    )
    yield ResumeChange("changed", {"key": "learning rate", "before": old, "now": new}, line)
