"""dstrain evaluate: metrics of a trained model on a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.trained_model import Choice, Found, hash_weights, load_found, quieten
from dstrain.config import RunConfig
from dstrain.data.sources.hub import parse_part
from dstrain.errors import DataError, UsageError
from dstrain.preset import Device
from dstrain.tasks import Task
from dstrain.tasks.common.reference import PolicyTask

if TYPE_CHECKING:
    from dstrain.distributed.world import World


@dataclass(frozen=True)
class Prepared:
    """What is evaluated, on what."""

    found: Found
    examples: Sequence[Any]
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Loss and metrics over a whole file, each a sum divided once."""

    choice: Choice
    data: str
    """A file, or a dataset on the hub."""
    many = True

    def words(self) -> list[str]:
        return ["evaluate", *self.choice.words(), "--data", named_data(self.data)]

    def check(self) -> RunConfig:
        return self._find().task.recipe

    def _find(self) -> Found:
        found = self.choice.find(f"data.eval={json.dumps(held_out(self.data))}", "data.eval_fraction=0")
        check_reference(found)
        return found

    def ready(self, processes: int, device: Device) -> Prepared:
        quieten()
        found = self._find()
        found.check()
        examples = found.task.examples("eval")
        if not examples:
            raise DataError(f"{self.data}: holds no sample to evaluate on")
        return Prepared(found, examples, found.ds_config(self.choice.ds_config, processes, device))

    def read_weights(self, ready: Prepared) -> None:
        hash_weights(ready.found.task, ready.found.checkpoint is not None)

    def run(self, ready: Prepared, world: World) -> dict[str, Any]:
        from dstrain.models.zero3 import sharded_construction
        from dstrain.train.engine.inference import ForwardEngine
        from dstrain.train.engine.module import Objective
        from dstrain.train.evaluate import Evaluation
        from dstrain.train.precompute_reference import Asking, add_references

        found, task = ready.found, ready.found.task
        asking = Asking(task=task, ds_config=ready.ds_config, micro=found.micro, world=world)
        examples = add_references(asking, [ready.examples])[0]
        assert examples is not None
        model = load_found(found, ready.ds_config, world)
        with sharded_construction(ready.ds_config):
            reference = task.build_reference() if task.reference == "model" else None
        engine = ForwardEngine(Objective(task, model, reference), ready.ds_config, world)
        row = Evaluation(task, examples, found.micro).run(engine)
        rates = {name: row.pop(name) for name in [*row] if name.endswith("_per_second")}
        about = {"file": self.data, "step": found.step, "examples": len(examples)}
        return {**about, **row, **task.baselines(examples), **rates}


def show_metrics(row: Mapping[str, Any]) -> str:
    """A line for each number; an exported folder has no step."""
    row = {name: value for name, value in row.items() if (name, value) != ("step", None)}
    return "\n".join(
        f"{name:24} {value:.6g}" if isinstance(value, float) else f"{name:24} {value}" for name, value in row.items()
    )


def named_data(data: str) -> str:
    """The same file for a process that works elsewhere."""
    return str(Path(data).expanduser().resolve()) if Path(data).expanduser().exists() else data


def held_out(data: str) -> Any:
    """What `data.eval` is set to. Raises UsageError where `data` is neither a file nor a dataset's name."""
    part = parse_part(data)
    if Path(data).expanduser().exists():
        return named_data(data)
    if part is None:
        raise UsageError(f"--data {data}: there is no such file (we are in {Path.cwd()}); check the path")
    return {"path": part.dataset, "split": part.split if ":" in data else None, "name": part.name}


def check_reference(found: Found) -> None:
    """Raise UsageError where an exported policy would be compared with itself, or its reference is not there."""
    task: Task = found.task
    if isinstance(task, PolicyTask):
        task.check_reference()
    if found.checkpoint is None and task.reference in ("model", "cached"):
        path = task.reference_model.path
        if path is not None and os.path.realpath(Path(path).expanduser()) == os.path.realpath(found.folder):
            raise UsageError(
                f"{found.folder}: a policy cannot be its own reference, and nothing here says whom it was trained "
                "against; give that model's folder with --set options.ref_model=FOLDER"
            )
