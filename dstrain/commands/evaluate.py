"""dstrain evaluate: metrics of a trained model on a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.run_job import Job
from dstrain.commands.trained_model import (
    ModelSelector,
    SavedModel,
    hash_weights,
    load_saved_model,
    quiet_libraries,
    resolve_data_path,
)
from dstrain.config import RunConfig
from dstrain.data.dataset import Dataset
from dstrain.data.prepare import describe_examples
from dstrain.ds_config import Device
from dstrain.errors import DataError, UsageError
from dstrain.process_setup import log_if_slow
from dstrain.tasks import Task
from dstrain.tasks.common.judge import check_generation_data, check_judge
from dstrain.tasks.common.task import load_split

if TYPE_CHECKING:
    from dstrain.distributed.world import World


@dataclass(frozen=True)
class PreparedEvaluation:
    """A model, and the dataset that it is evaluated on."""

    saved_model: SavedModel
    examples: Dataset
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvaluateJob(Job):
    """A job that computes loss and metrics over a whole file, each a sum divided once."""

    selector: ModelSelector
    data: str
    """A file, or a dataset on the hub."""

    def to_argv(self) -> list[str]:
        return ["evaluate", *self.selector.to_argv(), "--data", resolve_data_path(self.data)]

    def check_recipe(self) -> RunConfig:
        return self._find_model().task.recipe

    def _find_model(self) -> SavedModel:
        found = self.selector.find_model(self.data)
        check_reference(found)
        return found

    def prepare(self, world_size: int, device: Device) -> PreparedEvaluation:
        quiet_libraries()
        found = self._find_model()
        found.check_loadable()
        found.check_forward(found.task, device)
        examples = load_split(found.task, "eval")
        if not examples:
            raise DataError(f"{self.data}: holds no sample to evaluate on")
        check_generation_data(found.task, examples)
        return PreparedEvaluation(found, examples, found.build_ds_config(self.selector.ds_config, world_size, device))

    def cache_weight_hashes(self, prepared: PreparedEvaluation) -> None:
        hash_weights(prepared.saved_model.task, prepared.saved_model.checkpoint is not None)

    def run(self, prepared: PreparedEvaluation, world: World) -> dict[str, Any]:
        from dstrain.models.params import zero3_init
        from dstrain.training.build_model import add_frozen_models
        from dstrain.training.engine.base import ForwardEngine
        from dstrain.training.evaluate import Evaluation
        from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select

        found, task = prepared.saved_model, prepared.saved_model.task
        asking = OutputsJob(
            task=task, ds_config=prepared.ds_config, micro_batch_size=found.micro_batch_size, world=world
        )
        examples = add_outputs_and_select(asking, {"eval": prepared.examples})["eval"]
        assert examples is not None
        model = load_saved_model(found, prepared.ds_config, world)
        with zero3_init(prepared.ds_config):
            module = add_frozen_models(task, model)
        engine = ForwardEngine(module, prepared.ds_config, world)
        with log_if_slow(f"evaluating {len(examples)} samples", world.rank == 0):
            row = Evaluation(task, examples, found.micro_batch_size).run(engine)
        rates = {name: row.pop(name) for name in [*row] if name.endswith("_per_second")}
        about = {"file": self.data, "step": found.step, "examples": len(examples)}
        notes = describe_examples(prepared.examples.summarize())
        return {**about, **row, **task.checks.baselines(examples), **rates, "notes": notes}


def show_metrics(row: Mapping[str, Any]) -> str:
    """Return a line per metric, and the notes on the data; an exported folder has no step."""
    row = {name: value for name, value in row.items() if (name, value) != ("step", None)}
    lines = [
        f"{name:24} {value:.6g}" if isinstance(value, float) else f"{name:24} {value}"
        for name, value in row.items()
        if name != "notes"
    ]
    return "\n".join([*lines, *row["notes"]])


def check_reference(saved: SavedModel) -> None:
    """Raise UsageError where an exported policy would be its own reference, or its reference is missing."""
    task: Task = saved.task
    task.checks.reference()
    check_judge(task)
    if saved.checkpoint is None and task.loss_inputs.reference.kind in ("model", "cached"):
        path = task.loss_inputs.reference.config.path
        if path is not None and os.path.realpath(Path(path).expanduser()) == os.path.realpath(saved.folder):
            raise UsageError(
                f"{saved.folder}: a policy cannot be its own reference, and the folder does not name its reference; give "
                "the reference's folder with --set options.ref_model=FOLDER"
            )
