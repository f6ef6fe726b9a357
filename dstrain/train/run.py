"""A run, put together: everything the loop touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.batch import Progress
from dstrain.data.loading.loader import Loader
from dstrain.distributed.collective_log import COLLECTIVE_LOG
from dstrain.report.memory import memory_metrics
from dstrain.report.meter import Meter
from dstrain.report.run_log import RunLog
from dstrain.report.sinks import Sink
from dstrain.schedule import Every, LRSchedule
from dstrain.train.checkpoint.checkpoints import CheckpointStore
from dstrain.train.checkpoint.saver import CheckpointSaver
from dstrain.train.engine.deepspeed import Engine
from dstrain.train.evaluate import Evaluation
from dstrain.train.health.nonfinite import NonFiniteGuard
from dstrain.train.health.signals import STOP_SIGNALS, SignalHandler
from dstrain.train.health.trainability import TrainabilityCheck
from dstrain.train.profiler import StepProfiler
from dstrain.train.state.load import open_checkpoint
from dstrain.train.state.manifest import CheckpointInfo


@dataclass(frozen=True, kw_only=True)
class Run:
    """The nouns of a training run, and the few verbs that need several of them."""

    engine: Engine
    loader: Loader
    evaluation: Evaluation | None
    checkpoints: CheckpointStore
    saver: CheckpointSaver
    start_checkpoint: CheckpointInfo | None
    """Where to go on from."""
    run_log: RunLog
    sinks: Sequence[Sink]
    meter: Meter
    profiler: StepProfiler
    nonfinite_guard: NonFiniteGuard
    trainability: TrainabilityCheck
    signal_handler: SignalHandler
    lr_schedule: LRSchedule
    seed: int
    total_steps: int
    best_metric: str
    """The metric `best` goes by."""
    log_every: Every
    eval_every: Every
    save_every: Every

    def resume(self) -> Progress:
        """Go on from the newest whole checkpoint, or from nothing. Collective."""
        if self.start_checkpoint is not None:
            self._load_checkpoint(self.start_checkpoint)
        self.trainability.start()
        return Progress() if self.start_checkpoint is None else self.start_checkpoint.progress

    def _load_checkpoint(self, checkpoint: CheckpointInfo) -> None:
        anew = self.engine.load(open_checkpoint(checkpoint.path, self.engine.world))
        if anew:
            self.run_log.log_event("begins_anew", step=checkpoint.step, what=anew)
            if self.engine.world.rank == 0:
                print(anew, flush=True)

    def log_train_metrics(self, progress: Progress) -> None:
        """One row of training numbers, to every sink. Collective."""
        row = self.meter.drain(self.loader.pop_wait_seconds())
        self._write_row(
            progress,
            {
                "split": "train",
                **row,
                "lr": self.lr_schedule(progress.step - 1),
                **self.saver.pop_timings(),
                **memory_metrics(self.engine.world),
            },
        )

    def end_profiled_step(self, progress: Progress, is_last: bool) -> None:
        """Write the profile where its last step was just taken; `over`: as it was the run's last. Collective."""
        if self.profiler.end_step(progress.step, is_last):
            with self.meter.pause():
                self.profiler.write(progress.step)

    def evaluate(self, progress: Progress) -> float | None:
        """One row of held-out numbers; returns the metric `best` goes by, None without held-out data. Collective."""
        if self.evaluation is None:
            return None
        self.set_phase("evaluation", progress)
        with self.meter.pause():
            row = self.evaluation.run(self.engine)
        self._write_row(progress, {"split": "eval", **row})
        return row.get(self.best_metric)

    def save_checkpoint(self, progress: Progress, metric: float | None, is_last: bool) -> None:
        """Write a checkpoint, or begin to; the `last` is there on return. Collective."""
        self.set_phase("save", progress)
        with self.meter.pause():
            self.saver.save(progress, metric, is_last)

    def should_stop(self, progress: Progress) -> bool:
        """Whether any rank was asked to stop. Raises on all where a save behind training failed on one. Collective."""
        asked = [float(self.signal_handler.received_signal == number.name) for number in STOP_SIGNALS]
        *signals, failed, flying = self.engine.world.sum([*asked, self.saver.has_failed, not self.saver.is_finished])
        if failed or not flying:
            self.saver.wait()
        if not any(signals):
            return False
        self.signal_handler.agreed_signal = next(
            number.name for number, ranks in zip(STOP_SIGNALS, signals, strict=True) if ranks
        )
        if progress.step < self.total_steps:
            about = {
                "signal": self.signal_handler.agreed_signal,
                "expected_seconds": self.saver.grace.expected_stop_seconds(),
            }
            self.run_log.log_event("stopping", step=progress.step, **about)
        return True

    def set_phase(self, phase: str, progress: Progress) -> None:
        """Say what comes now, for the case that it does not end: `step`, `evaluation` or `save`; empty: nothing."""
        step = progress.step + (phase == "step")
        COLLECTIVE_LOG.record_progress({"step": f"step {step}", "": ""}.get(phase, f"{phase} after step {step}"), step)

    def _write_row(self, progress: Progress, row: Mapping[str, Any]) -> None:
        where = {
            "step": progress.step,
            "samples": progress.samples,
            "epoch": round(self.loader.sampler.epoch_at(progress.samples), 4),
        }
        for sink in self.sinks:
            sink.write({**where, **row})
