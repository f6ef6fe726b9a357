"""Start and end messages of a run, its warnings, and the sinks of its metrics."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from dstrain.config import RunConfig, dump_recipe, find_learning_changes
from dstrain.data.prepare import describe_examples
from dstrain.data.records import warn_without_images
from dstrain.distributed.world import World
from dstrain.ds_config import batch_warnings, ds_config_warnings
from dstrain.errors import EXIT_STOPPED, DstrainError, RunError, mask_secrets
from dstrain.process_setup import log_stdout
from dstrain.report.console import ConsoleSink, format_row
from dstrain.report.observe import observing
from dstrain.report.run_log import RunLog, find_last_row
from dstrain.report.sinks import QueuedSink, Sink, StepDisplay, TensorBoardSink, WandbSink
from dstrain.schedule import LRSchedule, scale_lr
from dstrain.tasks import Task
from dstrain.tasks.common.judge import make_judge
from dstrain.training.input_digests import iter_input_changes
from dstrain.training.plan import RunPlan
from dstrain.training.run import Run
from dstrain.training.run_report import ReportSink
from dstrain.training.sink_classes import find_sink_class
from dstrain.training.start import get_run_dir, read_recorded_recipe
from dstrain.training.state.manifest import CheckpointInfo

MAX_FAILURE_LENGTH = 4000
"""Limit of the characters of an error in events.jsonl."""


def make_sinks(
    plan: RunPlan,
    run_log: RunLog,
    world: World,
    start: CheckpointInfo | None,
    terminal: TextIO | None,
    is_finished: bool = False,
) -> tuple[list[Sink], StepDisplay | None]:
    """Build the sinks of rank 0, and the one of them that shows every step. Collective.

    The other ranks wait, so that the first step is not timed with it. A finished run has no more rows: no TensorBoard
    file or W&B run is opened for it.
    """
    console = ConsoleSink(plan.steps, terminal, plan.config.log.memory) if world.rank == 0 else None
    sinks: list[Sink] = [] if console is None else [console]
    if console is not None and not is_finished:
        sinks += _build_trackers(plan, run_log, start)
    world.barrier()  # W&B may take seconds to connect
    return sinks, console


def _build_trackers(plan: RunPlan, run_log: RunLog, start: CheckpointInfo | None) -> list[Sink]:
    """Build the sinks that the recipe asks for; one that cannot be built is left out with a warning."""
    wanted, step = plan.config.log, start.step if start else 0
    sinks: list[Sink] = [ReportSink(plan.run_dir)]
    if wanted.tensorboard:
        with observing("TensorBoard"):
            sinks.append(TensorBoardSink(plan.run_dir, step, dump_recipe(plan.config)))
    if wanted.wandb is not None:
        tracker: WandbSink | None = None
        with observing("Weights & Biases"):
            tracker = WandbSink(wanted.wandb, plan.run_dir, plan.config.model_dump(mode="json"))
        if tracker is not None:
            sinks.append(tracker)
            run_log.log_event("wandb", **tracker.event_fields)
    for name in wanted.sinks:
        build = partial(find_sink_class(name), plan.run_dir, plan.config.model_dump(mode="json"))
        queued = QueuedSink(name, build)
        run_log.add_listener(queued.log_event)
        sinks.append(queued)
    return sinks


def report_start(plan: RunPlan, run_log: RunLog, world: World, start: CheckpointInfo | None) -> None:
    """Report the start of a run in events.jsonl and on rank 0's terminal."""
    batch: dict[str, int | None] = {"total": plan.batch.total, "micro": plan.batch.micro}
    if plan.batch.accumulate is None:
        batch["tokens_per_micro"] = plan.batch.tokens
    else:
        batch["accumulate"] = plan.batch.accumulate
    fields = {
        "world_size": world.size,
        "preset": plan.preset.name,
        "batch": batch,
        "steps": plan.steps,
        "train_samples": len(plan.train_dataset),
        "eval_samples": None if plan.eval_dataset is None else len(plan.eval_dataset),
    }
    run_log.log_event("started", step=start.step if start else 0, **fields)
    reports = {
        split: report
        for split, examples in (("train", plan.train_dataset), ("eval", plan.eval_dataset))
        if (report := None if examples is None else examples.report) is not None
    }
    for split, report in reports.items():
        run_log.log_event("data", split=split, described=describe_examples(report), **report)
    if world.rank == 0:
        log_stdout(
            f"{task_name(plan.config.task)}: {len(plan.train_dataset)} samples, {plan.steps} steps of {plan.batch.describe(world.size)}, "
            f"preset {plan.preset.name}" + (f", continuing from step {start.step}" if start else ""),
        )
        selections = [f"{split}: {report['selection']}" for split, report in reports.items() if "selection" in report]
        for line in (*describe_splits(reports), *selections, *describe_frozen_models(plan.task, plan.preset.stage)):
            log_stdout(line)
    for line in plan.task.checks.info_messages():
        run_log.announce(line, "notice", what=line)
    found = {file: one for report in reports.values() for file, one in report.get("columns", {}).items()}
    for line in (
        *(warn_without_images(found) if plan.task.needs_vision else ()),
        *plan.task.checks.warnings(),
        *ds_config_warnings(plan.ds_config),
        *batch_warnings(plan.batch, world.size),
    ):
        run_log.warn(line)
    selection_warnings = [report["selection_warning"] for report in reports.values() if "selection_warning" in report]
    for line in (*selection_warnings, *plan.task.checks.data_warnings(plan.train_dataset, plan.eval_dataset)):
        run_log.warn(line, about="data")
    if start is not None and (resharding := describe_resharding(plan, world.size, start)):
        run_log.announce(resharding, "resharded", step=start.step, how=resharding)


_SCHEDULE_KEYS = ("steps", "epochs", "optim")


@dataclass(frozen=True)
class ResumeChange:
    """A difference that was allowed, or a warning."""

    event_name: str
    """`changed`, or `warning` for a difference that is not an allowed change."""
    event_fields: Mapping[str, Any]
    message: str
    """A line for the terminal."""


def iter_resume_changes(checkpoint: CheckpointInfo, plan: RunPlan, inputs: Mapping[str, Any]) -> Iterator[ResumeChange]:
    """Yield the allowed differences between the checkpoint's run and the planned one.

    `inputs` are the present digests, from `digest_inputs`.
    """
    before, at = read_recorded_recipe(checkpoint), f"from step {checkpoint.step} on"
    if get_run_dir(checkpoint) == plan.run_dir and not (plan.run_dir / "recipe.yaml").is_file():
        line = f"recipe.yaml is missing in {plan.run_dir}; it is written again after a comparison with the checkpoint's recipe"
        yield ResumeChange("warning", {"what": line}, f"warning: {line}")
    found = find_learning_changes(before, plan.config)
    for key, (old, new) in found.items():
        yield ResumeChange("changed", {"key": key, "before": old, "now": new}, f"{key}: {new!r} {at}, {old!r} before")
    recorded = checkpoint.run_info.get("inputs", {})
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
        yield from _iter_lr_changes(checkpoint, before, plan)


def _iter_lr_changes(checkpoint: CheckpointInfo, old_config: RunConfig, plan: RunPlan) -> Iterator[ResumeChange]:
    """Yield the learning rate of the next step by the old schedule and by the new one."""
    steps = checkpoint.run_info.get("steps", plan.steps)
    old, new = (
        LRSchedule(
            scale_lr(config.optim.peak_lr, config.optim.scale_lr, plan.batch.total, config.optim.scale_lr_base),
            config.optim.schedule, total, config.optim.warmup,
        )(checkpoint.step)
        for config, total in ((old_config, steps), (plan.config, plan.steps))
    )  # fmt: skip
    line = (
        f"the learning rate follows the schedule of a run of {plan.steps} steps from here on: "
        f"{new:.3g} at the next step, {old:.3g} by the old schedule"
    )
    yield ResumeChange("changed", {"key": "learning rate", "before": old, "now": new}, line)


def describe_frozen_models(task: Task, stage: int) -> list[str]:
    """Return a line for the reference of a task, for each reward model and for the judge, at a ZeRO stage."""
    inputs, online = task.loss_inputs, "a frozen model" + (", sharded" if stage == 3 else " in every process")
    judge = make_judge(task)
    return [
        *filter(None, [REFERENCE_MESSAGES.get(inputs.reference.kind)]),
        *(
            f"{scorer.name} reward model: {'precomputed scores from the cache' if scorer.is_cached else online}"
            for scorer in inputs.scorers
        ),
        *([] if judge is None else [f"judge of generated answers: {online}"]),
    ]


REFERENCE_MESSAGES = {
    "adapter": "reference: the model with its adapters disabled",
    "cached": "reference: precomputed log-probs from the cache",
}
"""Reference kind -> line for the terminal; `build_run` reports a frozen model when it builds one."""


def task_name(task: str) -> str:
    """Return the name of a packaged task, or of the task file without its folder."""
    return Path(task).name if task.endswith(".py") else task


def describe_splits(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of `describe_examples` for each split; once if both come from one file."""
    if reports.get("train") == reports.get("eval"):
        reports = {"data": reports["train"]} if reports else {}
    return [f"{split}: {line}" for split, report in reports.items() for line in describe_examples(report)]


def describe_resharding(plan: RunPlan, world_size: int, start: CheckpointInfo) -> str:
    """Return a sentence about another world size, ZeRO stage or preset; empty if all are the same."""
    before = (start.run_info.get("preset"), start.world_size, start.zero_stage)
    now = (plan.preset.name, world_size, plan.preset.stage)
    if before == now:
        return ""
    was, becomes = (
        f"{preset} (ZeRO stage {stage}) on {count} process{'es' * (count != 1)}"
        for preset, count, stage in (before, now)
    )
    return (
        f"step {start.step} was written by {was} and continues with {becomes}: weights, optimizer state, counters "
        f"and data position are loaded by name, the total batch stays {plan.batch.total}"
    )


def finish_run(run: Run, step: int, resume_option: str = "auto") -> int:
    """Report how a run ended and return the exit code. `resume_option` is the value of --resume."""
    folder = run.run_log.folder
    is_early = step < run.total_steps and run.early_stopping.is_due
    start_step = None if run.start_checkpoint is None else run.start_checkpoint.step
    if step < run.total_steps and not is_early:
        run.run_log.log_event("stopped", step=step, signal=run.signal_handler.agreed_signal)
        how = (
            "the same command continues"
            if resume_option == "auto"
            else f"without `--resume {resume_option}` the same command continues"
        )
        line, code = f"stopped at step {step} of {run.total_steps}; {how} from there", EXIT_STOPPED
    elif start_step == step:
        run.run_log.log_event("already_finished", step=step)
        done = f"early stopping ended it after step {step}" if is_early else f"all {run.total_steps} steps are done"
        line, code = f"this run is already finished: {done}", 0
    else:
        run.run_log.log_event("finished", step=step)
        left_out = (
            f"; {run.nonfinite.num_skipped} skipped, their loss or gradients not finite"
            if run.nonfinite.num_skipped
            else ""
        )
        steps = f"{step} of {run.total_steps} steps, by early stopping" if is_early else f"{run.total_steps} steps"
        line, code = f"finished: {steps}{left_out}", 0
    if run.engine.world.rank == 0:
        exported = (
            f"model files: dstrain export {shlex.quote(str(folder))} --to FOLDER" if line.startswith("finished") else ""
        )
        lines = [line, format_last_eval(folder, run.total_steps), f"run folder: {folder}", exported]
        with observing("the summary of the run"):  # the log may be on a full disk
            log_stdout("\n".join(filter(None, lines)))
    return code


def report_failure(run: Run, error: Exception) -> None:
    """Report the error that ends a run in events.jsonl."""
    text = str(error) if isinstance(error, DstrainError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(RunError):  # a full disk must not hide the error
        what = mask_secrets(text)[:MAX_FAILURE_LENGTH]
        run.run_log.log_event("failed", step=run.engine.world.log.step, what=what)


def format_last_eval(run_dir: Path, total_steps: int) -> str:
    """Return the last evaluation metrics as a line; empty without any, or if metrics.jsonl cannot be read."""
    with observing("the summary of the last evaluation"):  # it must not fail a run that is done
        row = find_last_row(run_dir / "metrics.jsonl", lambda row: row.get("split") == "eval" and "step" in row).row
        return f"held-out: {format_row(row, total_steps)}" if row is not None else ""
    return ""
