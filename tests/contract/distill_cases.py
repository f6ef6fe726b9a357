"""Worker functions of the tests of distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dstrain.config import read_recipe
from dstrain.distributed.world import World
from dstrain.tasks import make_task
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs
from tests.workers import worker_world


def outputs(recipe: str, cache: str, own: bool = False) -> list[np.ndarray]:
    """Return the teacher's ids of all samples. `own`: each process has a cache of its own, as hosts may have."""
    world: World = worker_world()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSTRAIN_CACHE", str(Path(cache) / f"rank {world.rank}") if own else cache)
        task = make_task(read_recipe(Path(recipe)).config)
        job = OutputsJob(task=task, ds_config={"zero_optimization": {"stage": 0}}, micro_batch_size=3, world=world)
        splits: Any = [task.examples("train"), task.examples("eval")]
        return [example["teacher_ids"] for split in add_frozen_outputs(job, splits) for example in split or ()]
