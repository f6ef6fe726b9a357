"""A run, put together: everything the loop touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.batch import Progress
from dstrain.data.loading.loader import Loader
from dstrain.distributed.collective_log import LEDGER
from dstrain.report.memory import memory
from dstrain.report.meter import Meter
from dstrain.report.run_log import Journal
from dstrain.report.sinks import Sink
from dstrain.schedule import Every, LearningRate
from dstrain.train.checkpoint.checkpoints import Checkpoints
from dstrain.train.checkpoint.saver import Saving
from dstrain.train.engine.deepspeed import Engine
from dstrain.train.evaluate import Evaluation
from dstrain.train.health.nonfinite import NonFiniteGuard
from dstrain.train.health.signals import SIGNALS, Interrupt
from dstrain.train.health.trainability import Learning
from dstrain.train.profiler import Profile
from dstrain.train.state.load import open_state
from dstrain.train.state.manifest import CheckpointInfo


@dataclass(frozen=True, kw_only=True)
class Run:
    """The nouns of a training run, and the few verbs that need several of them."""

    engine: Engine
    loader: Loader
    evaluation: Evaluation | None
    checkpoints: Checkpoints
    saving: Saving
    start: CheckpointInfo | None
    """Where to go on from."""
    journal: Journal
    sinks: Sequence[Sink]
    meter: Meter
    profile: Profile
    guard: NonFiniteGuard
    learning: Learning
    interrupt: Interrupt
    lr: LearningRate
    seed: int
    steps: int
    metric: str
    """The metric `best` goes by."""
    log: Every
    test: Every
    save: Every

    def resume(self) -> Progress:
        """Go on from the newest whole checkpoint, or from nothing. Collective."""
        if self.start is not None:
            self._load(self.start)
        self.learning.begin()
        return Progress() if self.start is None else self.start.progress

    def _load(self, start: CheckpointInfo) -> None:
        anew = self.engine.load(open_state(start.path, self.engine.world))
        if anew:
            self.journal.event("begins_anew", step=start.step, what=anew)
            if self.engine.world.rank == 0:
                print(anew, flush=True)

    def write(self, progress: Progress) -> None:
        """One row of training numbers, to every sink. Collective."""
        row = self.meter.drain(self.loader.take_wait())
        self._send(
            progress,
            {
                "split": "train",
                **row,
                "lr": self.lr(progress.step - 1),
                **self.saving.take_spent(),
                **memory(self.engine.world),
            },
        )

    def end_profile(self, progress: Progress, over: bool) -> None:
        """Write the profile where its last step was just taken; `over`: as it was the run's last. Collective."""
        if self.profile.ends(progress.step, over):
            with self.meter.paused():
                self.profile.write(progress.step)

    def evaluate(self, progress: Progress) -> float | None:
        """One row of held-out numbers; returns the metric `best` goes by, None without held-out data. Collective."""
        if self.evaluation is None:
            return None
        self.at("evaluation", progress)
        with self.meter.paused():
            row = self.evaluation.run(self.engine)
        self._send(progress, {"split": "eval", **row})
        return row.get(self.metric)

    def keep(self, progress: Progress, metric: float | None, last: bool) -> None:
        """Write a checkpoint, or begin to; the `last` is there on return. Collective."""
        self.at("save", progress)
        with self.meter.paused():
            self.saving.save(progress, metric, last)

    def stops(self, progress: Progress) -> bool:
        """Whether any rank was asked to stop. Raises on all where a save behind training failed on one. Collective."""
        asked = [float(self.interrupt.received == number.name) for number in SIGNALS]
        *signals, failed, flying = self.engine.world.sum([*asked, self.saving.failed, not self.saving.landed])
        if failed or not flying:
            self.saving.settle()
        if not any(signals):
            return False
        self.interrupt.agreed = next(number.name for number, ranks in zip(SIGNALS, signals, strict=True) if ranks)
        if progress.step < self.steps:
            about = {"signal": self.interrupt.agreed, "expected_seconds": self.saving.grace.expected()}
            self.journal.event("stopping", step=progress.step, **about)
        return True

    def at(self, doing: str, progress: Progress) -> None:
        """Say what comes now, for the case that it does not end: `step`, `evaluation` or `save`; empty: nothing."""
        step = progress.step + (doing == "step")
        LEDGER.mark({"step": f"step {step}", "": ""}.get(doing, f"{doing} after step {step}"), step)

    def _send(self, progress: Progress, row: Mapping[str, Any]) -> None:
        where = {
            "step": progress.step,
            "samples": progress.samples,
            "epoch": round(self.loader.plan.epoch(progress.samples), 4),
        }
        for sink in self.sinks:
            sink.write({**where, **row})
