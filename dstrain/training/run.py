"""A run: the loop over steps, evaluation, saves, and what is watched meanwhile."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from dstrain.batch import Progress, StepResult
from dstrain.data.loading.loader import Loader, Step
from dstrain.report.memory import memory_metrics
from dstrain.report.meter import Meter
from dstrain.report.observe import observing
from dstrain.report.run_log import RunLog
from dstrain.report.sinks import Sink, StepDisplay
from dstrain.schedule import Due, EarlyStopping, StepSchedule
from dstrain.training.engine.base import Engine, seed_step
from dstrain.training.evaluate import Evaluation
from dstrain.training.health.signals import SAVE_SIGNAL, SignalHandler
from dstrain.training.health.trainability import NonFiniteGuard, TrainabilityCheck
from dstrain.training.memory import MemoryMonitor
from dstrain.training.profiler import StepProfiler
from dstrain.training.saver import CheckpointSaver
from dstrain.training.state.engine_state import open_checkpoint
from dstrain.training.state.manifest import CheckpointInfo

Phase = Literal["step", "evaluation", "save"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The components of a training run."""

    engine: Engine
    loader: Loader
    evaluation: Evaluation | None
    """None without evaluation data."""
    early_stopping: EarlyStopping
    saver: CheckpointSaver
    start_checkpoint: CheckpointInfo | None
    """The checkpoint to continue from; None for a new run."""
    run_log: RunLog
    sinks: Sequence[Sink]
    """Where rows are shown or sent, beside metrics.jsonl."""
    meter: Meter
    profiler: StepProfiler | None
    """None: the recipe profiles no step."""
    trainability: TrainabilityCheck
    nonfinite: NonFiniteGuard
    signal_handler: SignalHandler
    schedule: StepSchedule
    memory: MemoryMonitor
    seed: int
    display: StepDisplay | None = None
    """The sink that shows every step; on rank 0 only."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.schedule.total_steps

    def resume(self) -> Progress:
        """Load the start checkpoint, if there is one, and return its progress. Collective.

        Raises StoppedBySignal if a signal came before the first step.
        """
        progress = Progress()
        if self.start_checkpoint is not None:
            checkpoint = self.start_checkpoint
            if reset := self.engine.load(open_checkpoint(checkpoint.path, self.engine.world)):
                self.run_log.announce(reset, "optimizer_state_reset", step=checkpoint.step, what=reset)
            progress = checkpoint.progress
        # After the load: the checksums are compared with the loaded weights, not with those of `init`.
        self.trainability.start()
        # A finished run takes no step, so a signal may end it at once.
        if not self.is_finished(progress):
            self.signal_handler.begin_training()
        return progress

    def is_finished(self, progress: Progress) -> bool:
        """Return True after the last step, and where early stopping ended the run."""
        return progress.step >= self.total_steps or self.early_stopping.is_due

    @contextmanager
    def phase(self, name: Phase, progress: Progress) -> Iterator[None]:
        """Context that names the activity of this rank, for the report of a stall. Phases may be nested.

        `progress` is that before a step, and after the step for an evaluation or a save.
        """
        log = self.engine.world.log
        outer = log.phase, log.step
        if name == "step":
            step, text = progress.step + 1, f"step {progress.step + 1}"
        else:
            step, text = progress.step, f"{name} after step {progress.step}"
        log.record_progress(text, step)
        yield  # not in try/finally: after an error the phase in which it was raised is to be reported
        log.record_progress(*outer)

    def iter_steps(self, progress: Progress) -> Generator[Step, None, None]:
        """Return this rank's batches of each step after `progress`."""
        return self.loader.iter_steps(progress.samples)

    def take_step(self, step: Step, progress: Progress, weight: float | None) -> StepResult:
        """Take one optimizer step; `weight` is that of all ranks' batches, None if it is not known. Collective."""
        # Dropout depends on seed, step and rank only, so a resumed run draws the same masks.
        seed_step(self.seed, progress.step, self.engine.world.rank)
        if self.profiler is not None:
            self.profiler.begin_step(progress.step + 1)
        self.saver.grace.begin_step()
        lr = self.schedule.lr(progress.step)
        return self.engine.step(step.batches, lr, weight)

    def end_step(self, result: StepResult, progress: Progress) -> None:
        """Add the step to the metrics and check it. Collective.

        Raises RunError: on every rank alike, or where the micro-batches of one rank differ in their gradients.
        """
        self.meter.add(result)
        start = 0 if self.start_checkpoint is None else self.start_checkpoint.step
        self.memory.compare_with_forecast(progress.step - start, self.run_log)
        self.trainability.check_step(result, self.schedule.lr(progress.step - 1))
        self.nonfinite.check_step(result, progress)
        self.saver.grace.end_step()
        if self.display is not None:
            with observing("the progress line"):
                self.display.end_step(progress.step, self.loader.epoch_at(progress.samples))

    def sync(self, step: Step, progress: Progress) -> tuple[Due, float | None]:
        """Return what is due after a step, where signals count, and the weight of the next step. Collective.

        The weight is that of all ranks' batches, None where a rank has not made its own yet. Commits a background save
        that all ranks have written; raises its error.
        """
        weight = step.next_weight()
        # In one sum: messages pass through all ranks one after another, and the devices have nothing to do meanwhile.
        total, missing, failed, writing, *counts = self.engine.world.sum(
            [
                *(weight or 0.0, weight is None, self.saver.has_failed, self.saver.is_writing),
                *self.signal_handler.signal_flags(),
            ]
        )
        # Before a stop: a failed background save ends the run with its own error.
        self.saver.poll(failed, writing)
        signal_name, is_save_requested = self.signal_handler.agree(counts)
        due = self.schedule.due_after(progress.step, self._log_stop(signal_name, progress))
        if is_save_requested:
            self.run_log.log_event("save_requested", step=progress.step, signal=SAVE_SIGNAL.name)
            due = replace(due, save=True)
        return due, None if missing else total

    def should_stop(self, progress: Progress) -> bool:
        """Return True if a signal asked any rank to stop, the same on every rank. Collective."""
        return self._log_stop(self.signal_handler.sync_signal(self.engine.world), progress)

    def _log_stop(self, signal_name: str | None, progress: Progress) -> bool:
        if signal_name is not None and progress.step < self.total_steps:
            seconds = self.saver.grace.save_seconds
            self.run_log.log_event("stopping", step=progress.step, signal=signal_name, expected_seconds=seconds)
        return signal_name is not None

    def due_after_evaluation(self, progress: Progress, due: Due) -> Due:
        """Return `due`, or what a stop needs where a signal ended the evaluation, or early stopping ends the run.

        Collective in these cases.
        """
        stops_early = due.eval and self.early_stopping.is_due
        if due.is_last or (self.signal_handler.agreed_signal is None and not stops_early):
            return due
        if not due.log:
            self.log_train_metrics(progress)
        if stops_early:
            stopping = self.early_stopping
            line = f"early stopping after step {progress.step}: {stopping}"
            self.run_log.announce(line, "early_stopping", step=progress.step, **stopping.state_dict())
            self.write_profile(progress, True)
        return self.schedule.due_after(progress.step, True)

    def write_profile(self, progress: Progress, is_last: bool) -> None:
        """Write the profile after its last step or the last step of the run.

        Raises NonFiniteError after the last step of a run that changed no weight. Collective.
        """
        if self.profiler is not None and self.profiler.end_step(progress.step, is_last):
            with self.meter.pause():  # writing a trace may take longer than a step
                self.profiler.write(progress.step)
        # Before the last checkpoint, which would pass for a trained model.
        if progress.step >= self.total_steps:
            self.nonfinite.check_run(progress)

    def log_train_metrics(self, progress: Progress) -> None:
        """Write one row of training metrics to metrics.jsonl and every sink. Collective."""
        # Means over the steps since the last row, so each step counts in one row.
        row = self.meter.drain(self.loader.pop_wait_seconds())
        timings = self.saver.pop_timings()
        # That of the step just taken; schedules count from 0.
        lr = self.schedule.lr(progress.step - 1)
        memory = memory_metrics(self.engine.world)
        self._write_row(progress, {"split": "train", **row, "lr": lr, **timings, **memory})

    def evaluate(self, progress: Progress) -> float | None:
        """Write one row of evaluation metrics; return the metric that `best` compares. Collective.

        Returns None without evaluation data, and where a signal ended the evaluation; not the one after the last step.
        """
        if self.evaluation is None:
            return None
        with self.phase("evaluation", progress), self.meter.pause():
            row = self.evaluation.run(
                self.engine, lambda: progress.step < self.total_steps and self.should_stop(progress)
            )
        if row:
            self._write_row(progress, {"split": "eval", **row})
            # Rank 0's value, so that all ranks end with the same evaluation.
            metric = self.engine.world.broadcast(row.get(self.evaluation.best_metric))
            self.early_stopping.add(progress.step, metric)
        return row.get(self.evaluation.best_metric)

    def save_checkpoint(self, progress: Progress, metric: float | None, is_last: bool) -> None:
        """Write a checkpoint, or begin to in the background; the last one is complete on return. Collective."""
        with self.phase("save", progress), self.meter.pause():
            self.saver.save(progress, metric, is_last)

    def _write_row(self, progress: Progress, row: Mapping[str, Any]) -> None:
        epoch = round(self.loader.epoch_at(progress.samples), 4)
        position = {"step": progress.step, "samples": progress.samples, "epoch": epoch}
        self.run_log.log_metrics({**position, **row})
        for sink in self.sinks:
            with observing(f"{type(sink).__name__}.write"):
                sink.write({**position, **row})

    def close(self, exit_code: int) -> None:
        """Close sinks and log; W&B marks its run by the exit code."""
        for sink in self.sinks:
            with observing(f"{type(sink).__name__}.close"):
                sink.close(exit_code)
        self.run_log.close()


def train(run: Run) -> Progress:
    """Train until all steps are taken or a signal asks for a stop; return where it ended. Collective."""
    progress = run.resume()
    steps, is_last = run.iter_steps(progress), run.is_finished(progress)
    weight: float | None = None
    while not is_last:
        with run.phase("step", progress):
            step = next(steps)  # in the phase: a rank that waits for data keeps the others waiting
            result = run.take_step(step, progress, weight)
            progress = progress.advance(step.num_samples)
            run.end_step(result, progress)
            due, weight = run.sync(step, progress)
            run.write_profile(progress, due.is_last)
            if due.log:
                run.log_train_metrics(progress)
            metric = run.evaluate(progress) if due.eval else None
            due = run.due_after_evaluation(progress, due)
            if due.save:
                run.save_checkpoint(progress, metric, due.is_last)
            is_last = due.is_last
    return progress
