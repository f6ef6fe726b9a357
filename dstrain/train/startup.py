"""What a run tells: where its rows go, how it starts and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from dstrain.config import show_recipe
from dstrain.data.encoding.truncation import show_cuts
from dstrain.distributed.world import World
from dstrain.report.run_log import Journal, read_rows
from dstrain.report.sinks import Console, Jsonl, Sink, TensorBoard, as_line
from dstrain.report.wandb import WeightsAndBiases
from dstrain.train.ds_config import batch_warnings, ds_config_warnings
from dstrain.train.plan import Plan
from dstrain.train.resume.changes import Change
from dstrain.train.run import Run
from dstrain.train.state.manifest import CheckpointInfo


def make_sinks(
    plan: Plan, journal: Journal, world: World, start: CheckpointInfo | None, screen: TextIO | None
) -> list[Sink]:
    """Rank 0 gets them; the others wait for it, so that the first step is not charged with it. Collective."""
    sinks = _sinks(plan, journal, start, screen) if world.rank == 0 else []
    world.barrier()
    return sinks


def _sinks(plan: Plan, journal: Journal, start: CheckpointInfo | None, screen: TextIO | None) -> list[Sink]:
    """A terminal gets a progress bar, everything else lines."""
    sinks: list[Sink] = [Jsonl(journal), Console(plan.steps, screen)]
    wanted, step = plan.config.log, start.step if start else 0
    if step >= plan.steps:
        return sinks  # nothing will come
    if wanted.tensorboard:
        sinks.append(TensorBoard(plan.run_dir, step, show_recipe(plan.config)))
    if wanted.wandb is not None:
        tracker = WeightsAndBiases(wanted.wandb, plan.run_dir, plan.config.model_dump(mode="json"))
        journal.event("wandb", **tracker.about)
        sinks.append(tracker)
    return sinks


def describe_start(plan: Plan, journal: Journal, world: World, start: CheckpointInfo | None) -> None:
    """Say what is about to happen, in events.jsonl and on rank 0's terminal."""
    about = {
        "world_size": world.size,
        "preset": plan.preset.name,
        "batch": {"total": plan.batch.total, "micro": plan.batch.micro, "accumulate": plan.batch.accumulate},
        "steps": plan.steps,
        "train_samples": len(plan.train),
        "eval_samples": None if plan.test is None else len(plan.test),
    }
    journal.event("started", step=start.step if start else 0, **about)
    reports = {
        split: report
        for split, examples in (("train", plan.train), ("eval", plan.test))
        if (report := getattr(examples, "report", None)) is not None
    }
    for split, report in reports.items():
        journal.event("data", split=split, **report)
    if world.rank == 0:
        print(
            f"{task_name(plan.config.task)}: {len(plan.train)} samples, {plan.steps} steps of {plan.batch.show(world.size)}, "
            f"preset {plan.preset.name}" + (f", going on from step {start.step}" if start else ""),
            flush=True,
        )
        told = [*told_cuts(reports), *filter(None, [REFERENCES.get(plan.task.reference)])]
        print("".join(f"{line}\n" for line in told), end="", flush=True)
    for line in plan.task.notices():
        journal.event("notice", what=line)
        if world.rank == 0:
            print(line, flush=True)
    warnings = *ds_config_warnings(plan.ds_config), *batch_warnings(plan.batch, world.size)
    tell_warnings((*plan.task.warnings(), *warnings), journal, world)
    if start is not None and (other := reshaping(plan, world.size, start)):
        journal.event("reshaped", step=start.step, how=other)
        if world.rank == 0:
            print(other, flush=True)


def tell_warnings(lines: Iterable[str], journal: Journal, world: World) -> None:
    """Say what is allowed and may surprise, in events.jsonl and on rank 0's terminal."""
    for line in lines:
        journal.event("warning", what=line)
        if world.rank == 0:
            print(f"warning: {line}", flush=True)


def tell_changes(found: Iterable[Change], journal: Journal, world: World) -> None:
    """Say what is other than before, in events.jsonl and on rank 0's terminal."""
    for change in found:
        journal.event(change.kind, **change.about)
        if world.rank == 0:
            print(change.line, flush=True)


REFERENCES = {
    "adapter": "reference: the model with its adapters off",
    "cached": "reference: its answers, kept in the cache",
}
"""Kind of a task's reference -> a line on it; a frozen model is told where it is built (`assemble`)."""


def task_name(task: str) -> str:
    """A packaged task's name, or that of the file, without its folder."""
    return Path(task).name if task.endswith(".py") else task


def told_cuts(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was cut of each split's samples, in sentences; once where both splits were held apart from one file."""
    if reports.get("train") == reports.get("eval"):
        reports = {"data": reports["train"]} if reports else {}
    return [f"{split}: {line}" for split, report in reports.items() if (line := show_cuts(report))]


def reshaping(plan: Plan, processes: int, start: CheckpointInfo) -> str:
    """What changes of how the state is held, in a sentence; empty where nothing does."""
    before = (start.record().get("preset"), start.world_size, start.zero_stage)
    now = (plan.preset.name, processes, plan.preset.stage)
    if before == now:
        return ""
    was, becomes = (
        f"{preset} (ZeRO stage {stage}) on {count} process{'es' * (count != 1)}"
        for preset, count, stage in (before, now)
    )
    return (
        f"step {start.step} was written by {was} and goes on as {becomes}: weights, optimizer state, counters and data "
        f"position are taken over by name, the total batch stays {plan.batch.total}"
    )


def finish(run: Run, step: int, resume: str = "auto") -> int:
    """Say how it ended; the exit code. `resume`: what --resume asked for."""
    folder = run.checkpoints.folder.parent
    if step < run.steps:
        run.journal.event("stopped", step=step, signal=run.interrupt.agreed)
        how = (
            "the same command goes on" if resume == "auto" else f"without `--resume {resume}` the same command goes on"
        )
        line, code = f"stopped at step {step} of {run.steps}; {how} from there", 75
    elif run.start is not None and run.start.step >= run.steps:
        run.journal.event("already_finished", step=step)
        line, code = f"this run is finished already: all {run.steps} steps are done", 0
    else:
        run.journal.event("finished", step=step)
        left_out = f"; {run.guard.skipped} left out, their loss or gradients not finite" if run.guard.skipped else ""
        line, code = f"finished: {run.steps} steps{left_out}", 0
    if run.engine.world.rank == 0:
        print("\n".join(filter(None, [line, last_held_out(folder, run.steps), f"run folder: {folder}"])), flush=True)
    return code


def last_held_out(run_dir: Path, steps: int) -> str:
    """The last held-out numbers of a run of so many steps, for people."""
    rows = read_rows(run_dir / "metrics.jsonl")  # not a reason for a run that is done to fail
    tests = [row for row in rows if row.get("split") == "eval" and "step" in row]
    return f"held-out: {as_line(tests[-1], steps)}" if tests else ""
