"""What is other in a run that goes on than when its checkpoint was written: told, and kept in events.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.config import RunConfig, find_learning_changes
from dstrain.schedule import LRSchedule, scale_lr
from dstrain.train.plan import RunPlan
from dstrain.train.resume.inputs import iter_input_changes
from dstrain.train.resume.recorded import get_run_dir, read_recorded_recipe
from dstrain.train.state.manifest import CheckpointInfo

_SCHEDULE_KEYS = ("steps", "epochs", "optim")


@dataclass(frozen=True)
class ResumeChange:
    """One of them."""

    event_name: str
    """Of the event: `changed`, or `warning` where it is not a change that was allowed."""
    event_fields: Mapping[str, Any]
    """Of the event."""
    message: str
    """For people."""


def iter_resume_changes(checkpoint: CheckpointInfo, plan: RunPlan, inputs: Mapping[str, Any]) -> Iterator[ResumeChange]:
    """What was allowed to differ from the run at `start`, and does. `inputs`: as `inputs_of` has them now."""
    before, at = read_recorded_recipe(checkpoint), f"from step {checkpoint.step} on"
    if get_run_dir(checkpoint) == plan.run_dir and not (plan.run_dir / "recipe.yaml").is_file():
        known = "was compared with the recipe in the checkpoint" if before else "could not be compared with its recipe"
        line = f"recipe.yaml is missing in {get_run_dir(checkpoint)}; the run {known}, and the file is written again"
        yield ResumeChange("warning", {"what": line}, f"warning: {line}")
    found = {} if before is None else find_learning_changes(before, plan.config)
    for key, (old, new) in found.items():
        yield ResumeChange("changed", {"key": key, "before": old, "now": new}, f"{key}: {new!r} {at}, {old!r} before")
    recorded = checkpoint.read_run_info().get("inputs", {})
    for key, what in iter_input_changes(recorded, inputs):
        yield ResumeChange("changed", {"key": key, "what": what}, f"{key}: {at} {what}")
    old, new = (kept.get("data.eval", {}).get("path") for kept in (recorded, inputs))
    if recorded and old != new:
        line = f"data.eval: {new} {at}, {old} before; held-out numbers of the two do not compare, nor does `best`"
        yield ResumeChange("changed", {"key": "data.eval", "before": old, "now": new}, line)
    if before is not None and any(key.split(".")[0] in _SCHEDULE_KEYS for key in found):
        yield from _iter_lr_changes(checkpoint, before, plan)


def _iter_lr_changes(checkpoint: CheckpointInfo, old_config: RunConfig, plan: RunPlan) -> Iterator[ResumeChange]:
    """The learning rate of the next step, by both schedules."""
    steps = checkpoint.read_run_info().get("steps", plan.steps)
    old, new = (
        LRSchedule(
            scale_lr(config.optim.peak_lr, config.optim.scale_lr, plan.initial_world_size, config.optim.scale_lr_base),
            config.optim.schedule, total, config.optim.warmup,
        )(checkpoint.step)
        for config, total in ((old_config, steps), (plan.config, plan.steps))
    )  # fmt: skip
    line = f"the learning rate is that of a run of {plan.steps} steps from here on: {new:.3g} at the next step, by the old schedule {old:.3g}"
    yield ResumeChange("changed", {"key": "learning rate", "before": old, "now": new}, line)
