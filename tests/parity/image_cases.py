"""Worker functions of test_images: steps of samples with and without images, assigned to the ranks by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from dstrain.batch import Batch
from dstrain.data.loading.loader import make_batch
from dstrain.data.vision.processor import VisionProcessor
from dstrain.tasks.common.task import as_dataset
from dstrain.training.evaluate import Evaluation
from tests.parity.cases import Made, made, world

Dealt = Sequence[Sequence[Sequence[int]]]
"""Of one step: the samples of each pass, of each rank."""


@dataclass(frozen=True)
class Course:
    """Steps, and the held-out samples that are evaluated before each."""

    steps: Sequence[Dealt]
    looks: Sequence[Sequence[int]] = ()

    def batches(self, run: Made, step: int) -> list[Batch]:
        """Return this rank's batches with fillers as the loader makes them; with one process all samples in one batch."""
        ranks, dealt = run.engine.world, self.steps[step]
        every = [sample for passes in dealt for ids in passes for sample in ids]
        mine = dealt[ranks.rank] if ranks.size > 1 else [every]
        return [make_batch(run.examples, run.task.collate, list(ids), every[0]) for ids in mine]

    def look(self, run: Made, step: int) -> list[float]:
        if not self.looks:
            return []
        examples = [run.examples[index] for index in self.looks[step]]
        return [Evaluation(run.task, as_dataset(examples), 2).run(run.engine)["loss"]]


def losses(
    task: str, kind: str, course: Course, changes: dict[str, Any] | None = None, blank: bool = True
) -> dict[str, Any]:
    """Return the mean loss of each step and evaluation, and whether the reference is sharded. Collective."""
    with nullcontext() if blank else without_blank_images():
        run = made(task, kind, len(course.steps[0][0]), changes)
        told = []
        for step in range(len(course.steps)):
            told += course.look(run, step)
            result = run.engine.step(course.batches(run, step), lr=run.task.recipe.optim.lr)
            told.append(float(np.divide(*run.engine.world.sum([float(result.loss), result.weight]))))
    held = run.engine.train_module.reference_model
    return {
        "losses": told,
        "sharded reference": held is not None and all(hasattr(one, "ds_id") for one in held.parameters()),
        "images": [len(example.get("images", ())) for example in map(run.examples.__getitem__, range(9))],
    }


def without_blank_images() -> AbstractContextManager[Any]:
    """Within the context, batches without images get no blank image."""
    into = VisionProcessor.attach_images
    return mock.patch.object(
        VisionProcessor, "attach_images", lambda sight, batch, images: into(sight, batch, images) if images else batch
    )


def ready() -> None:
    """Import everything that the workers need. Collective."""
    world()
