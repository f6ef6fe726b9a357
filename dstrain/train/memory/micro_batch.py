"""The micro-batch of a run, which `batch.on_oom: shrink` halves when memory runs out; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dstrain.config import BatchPlan, RunConfig
from dstrain.train.memory.reduced_batch import describe_reduction, write_reduced_batch


@dataclass
class MicroBatch:
    """Sizes of a run's forward passes now, alike on every rank."""

    config: RunConfig
    """Recipe with these sizes."""
    plan: BatchPlan
    world_size: int
    run_dir: Path

    def find_reduced(self, samples: Sequence[int] = ()) -> BatchPlan | None:
        """Return the plan with half the micro-batch; None if the recipe says stop, or no pass can be reduced.

        `samples`: the numbers of samples of the passes that failed, where they are known.
        """
        if self.config.batch.on_oom == "stop" or any(count <= 1 for count in samples):
            return None
        return self.plan.half(self.world_size)

    def store(self, reduced: BatchPlan, step: int) -> str:
        """Write the smaller micro-batch into the run folder, for later starts; return `batch.micro 8 -> 4`.

        `step`: steps taken so far. Ranks that call it at the same time write the same.
        """
        write_reduced_batch(self.run_dir, self.config, reduced, (self.world_size, step))
        return describe_reduction(self.plan, reduced)

    def use(self, reduced: BatchPlan) -> None:
        """Use the smaller micro-batch from now on."""
        self.config = self.config.model_copy(update={"batch": reduced.to_config(self.config.batch)})
        self.plan = reduced
