"""Look at held-out data: every sample once, the same number of passes on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.batch import Batch, StepResult
from dstrain.data.loading.loader import read_shares
from dstrain.data.loading.sampler import eval_share, lengths_of
from dstrain.distributed.collective_log import LEDGER
from dstrain.report.meter import Meter
from dstrain.tasks import Task
from dstrain.train.engine.deepspeed import Looks


@dataclass(frozen=True)
class Evaluation:
    """Held-out samples and how they are cut up."""

    task: Task
    examples: Sequence[Any]
    micro: int

    def run(self, engine: Looks) -> dict[str, float]:
        """Loss and metrics: each one sum over all ranks, divided once. Collective."""
        meter = Meter(engine.world)
        ranks = engine.world.size, engine.world.rank
        shares = eval_share(len(self.examples), self.micro, *ranks, lengths_of(self.examples))
        for result in look(engine, self.task, lambda: read_shares(self.examples, self.task.collate, shares)):
            meter.add(result)
            LEDGER.mark()
        row = meter.drain()
        row.pop("step_seconds", None)  # a pass is no step
        return row


def look(engine: Looks, task: Task, read: Callable[[], Iterable[Batch]]) -> Iterator[StepResult]:
    """Sums over each batch, once all have been surveyed where the task asks for that: `read` is then called twice. Collective."""
    batches = read()
    if task.surveys:
        told = engine.survey(batches)
        batches = (batch.plus(more) for batch, more in zip(read(), told, strict=True))
    for batch in batches:
        yield engine.evaluate(batch)
