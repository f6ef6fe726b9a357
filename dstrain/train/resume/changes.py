"""What is other in a run that goes on than when its checkpoint was written: told, and kept in events.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.config import RunConfig, learning_changes
from dstrain.schedule import LearningRate, scale
from dstrain.train.plan import Plan
from dstrain.train.resume.inputs import changed_inputs
from dstrain.train.run_dir import recipe_of, run_of
from dstrain.train.state.manifest import CheckpointInfo

_OF_SCHEDULE = ("steps", "epochs", "optim")


@dataclass(frozen=True)
class Change:
    """One of them."""

    kind: str
    """Of the event: `changed`, or `warning` where it is not a change that was allowed."""
    about: Mapping[str, Any]
    """Of the event."""
    line: str
    """For people."""


def changes(start: CheckpointInfo, plan: Plan, inputs: Mapping[str, Any]) -> Iterator[Change]:
    """What was allowed to differ from the run at `start`, and does. `inputs`: as `inputs_of` has them now."""
    before, at = recipe_of(start), f"from step {start.step} on"
    if run_of(start) == plan.run_dir and not (plan.run_dir / "recipe.yaml").is_file():
        known = "was compared with the recipe in the checkpoint" if before else "could not be compared with its recipe"
        line = f"recipe.yaml is missing in {run_of(start)}; the run {known}, and the file is written again"
        yield Change("warning", {"what": line}, f"warning: {line}")
    found = {} if before is None else learning_changes(before, plan.config)
    for key, (old, new) in found.items():
        yield Change("changed", {"key": key, "before": old, "now": new}, f"{key}: {new!r} {at}, {old!r} before")
    recorded = start.record().get("inputs", {})
    for key, what in changed_inputs(recorded, inputs):
        yield Change("changed", {"key": key, "what": what}, f"{key}: {at} {what}")
    old, new = (kept.get("data.eval", {}).get("path") for kept in (recorded, inputs))
    if recorded and old != new:
        line = f"data.eval: {new} {at}, {old} before; held-out numbers of the two do not compare, nor does `best`"
        yield Change("changed", {"key": "data.eval", "before": old, "now": new}, line)
    if before is not None and any(key.split(".")[0] in _OF_SCHEDULE for key in found):
        yield from _of_rate(start, before, plan)


def _of_rate(start: CheckpointInfo, before: RunConfig, plan: Plan) -> Iterator[Change]:
    """The learning rate of the next step, by both schedules."""
    steps = start.record().get("steps", plan.steps)
    old, new = (
        LearningRate(
            scale(config.optim.peak_lr, config.optim.scale_lr, plan.began_with, config.optim.scale_lr_base),
            config.optim.schedule, total, config.optim.warmup,
        )(start.step)
        for config, total in ((before, steps), (plan.config, plan.steps))
    )  # fmt: skip
    line = f"the learning rate is that of a run of {plan.steps} steps from here on: {new:.3g} at the next step, by the old schedule {old:.3g}"
    yield Change("changed", {"key": "learning rate", "before": old, "now": new}, line)
