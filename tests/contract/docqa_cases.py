"""Worker functions of the tests of task docqa."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from dstrain.tasks.common.generation import Prompts
from dstrain.training import evaluate
from dstrain.training.generate import GenerationModel, generate_answers
from dstrain.training.health.signals import SignalHandler
from tests.resume.cases import run


def run_without_generation(**arguments: Any) -> dict[str, Any]:
    """Train as `tests.resume.cases:run`; evaluations generate no answers."""
    with mock.patch.object(Prompts, "metrics", None):
        return run(**arguments)


def run_stopped_while_generating(**arguments: Any) -> dict[str, Any]:
    """Train as `tests.resume.cases:run`; SIGTERM reaches rank 1 while the first evaluation generates answers.

    `batches`: how often a batch of answers was generated on every rank.
    """
    handlers: list[SignalHandler] = []
    generated: list[int] = []

    def generate(model: GenerationModel, prompts: Sequence[Any], *more: Any) -> list[list[int]]:
        generated.append(len(prompts))
        if model.world.rank == 1:
            handlers[-1].received_signal = "SIGTERM"
        return generate_answers(model, prompts, *more)

    with (
        mock.patch.object(SignalHandler, "begin_training", lambda self: handlers.append(self)),
        mock.patch.object(evaluate, "generate_answers", generate),
    ):
        return {**run(**arguments), "batches": len(generated)}
