"""Registry of tasks: find one by name, file or module, and make it from a recipe's options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dstrain.config.schema import DataConfig, LoraConfig, RunConfig
from dstrain.data.dataset import takes_positions
from dstrain.errors import Fault, TaskError, describe_fault, suggest_name
from dstrain.tasks.common.options import validate_options
from dstrain.tasks.common.task import DATA_KEYS, Task
from dstrain.tasks.common.task_files import import_task_file


def builtin_tasks() -> list[str]:
    """Return the names of the tasks that come with dstrain: the modules of dstrain/tasks."""
    folder = Path(__file__).parents[1]
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg)


def find_task(name: str) -> type[Task]:
    """Return the task class of a packaged task, a file path, or a dotted module. Raises TaskError."""
    module = _import_task_module(name)
    defined = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    found = [task for task in defined if not inspect.isabstract(task)]
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise TaskError(
            f"--task {name}: defines {names}; a task file defines one concrete subclass of dstrain.tasks.Task"
        )
    if not dataclasses.is_dataclass(found[0]) or "__dataclass_fields__" not in vars(found[0]):
        raise TaskError(
            f"--task {name}: {found[0].__name__} is not a dataclass; write @dataclass(frozen=True, kw_only=True) above it"
        )
    _check_positions(found[0])
    return found[0]


def _import_task_module(name: str) -> ModuleType:
    if name in builtin_tasks():
        return importlib.import_module(f"dstrain.tasks.{name}")
    try:
        if name.endswith(".py") or "/" in name or name.startswith("."):
            return import_task_file(Path(name))
        if "." in name:
            return importlib.import_module(name)
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"--task {name}: cannot be imported ({describe_fault(error)}); fix the file") from error
    raise TaskError(f"task '{name}': unknown task; {suggest_name(name, builtin_tasks())}")


LORA_LR_FACTOR = 10.0
"""Factor of LoRA's default learning rate over that of full training; sources are in docs/optimizers.md."""


def default_learning_rate(task: type[Task], use_lora: bool) -> float:
    """Return the task's default peak learning rate, for full training or for LoRA."""
    return float(f"{task.learning_rate * (LORA_LR_FACTOR if use_lora else 1.0):.6g}")


def default_lora(task: type[Task]) -> LoraConfig | None:
    """Return the adapters that the task trains where the recipe does not write model.lora; None: it trains the weights."""
    found: LoraConfig | None = getattr(task, "default_lora", None)  # of text tasks
    return found


def fill_lora(recipe: RunConfig) -> RunConfig:
    """Return the recipe with the task's adapters where model.lora is not written, not even as null. Raises TaskError."""
    if "lora" in recipe.model.model_fields_set:
        return recipe
    lora = default_lora(find_task(recipe.task))
    if lora is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": lora})})


def fill_learning_rate(recipe: RunConfig) -> RunConfig:
    """Return the recipe with the task's learning rate where optim.lr is not set. Raises TaskError.

    Call `fill_lora` first: the rate for adapters is another.
    """
    if recipe.optim.lr is not None:
        return recipe
    lr = default_learning_rate(find_task(recipe.task), recipe.model.lora is not None)
    return recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"lr": lr})})


def make_task(recipe: RunConfig) -> Task:
    """Return the recipe's task with validated options. Raises TaskError with every fault."""
    task, recipe = find_task(recipe.task), fill_learning_rate(fill_lora(recipe))
    if recipe.batch.packing is True and not getattr(task, "packs_batches", False):
        problem = f"is true, but task {recipe.task} has padded rows only"
        raise TaskError(Fault("batch.packing", problem, "leave it out"))
    if recipe.model.quantize is not None and recipe.model.lora is None:
        problem = f"is {recipe.model.quantize}, but quantized weights cannot be trained, only adapters on them"
        raise TaskError(Fault("model.quantize", problem, "add model.lora, e.g. `lora: {rank: 16}`, or leave it out"))
    if faults := list(_find_unread_keys(task, recipe)):
        raise TaskError(faults)
    values = validate_options(task, recipe)
    try:
        made = task(recipe=recipe, **values)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"options of task {recipe.task}: {error}; `dstrain tasks {recipe.task}` documents them"
        ) from error
    known, metric = ("loss", *made.metric_names), recipe.eval.metric
    if made.metric_names and metric not in known:
        raise TaskError(
            Fault("eval.metric", f"'{metric}' is not a metric of task {recipe.task}", suggest_name(metric, known))
        )
    return made


def _find_unread_keys(task: type[Task], recipe: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each key of `data` that is set, and that the task's `examples` does not apply."""
    data, defaults = recipe.data, DataConfig()
    is_set = {name: getattr(data, name) != getattr(defaults, name) for name in DATA_KEYS if name != "weight"}
    is_set["weight"] = any(item.weight != 1.0 for item in data.train)
    is_set["columns"] |= any(item.columns for item in (*data.train, *([data.eval] if data.eval else [])))
    for name in DATA_KEYS:
        if is_set[name] and name not in task.data_keys:
            key = "data.train[].weight" if name == "weight" else f"data.{name}"
            problem = f"is set, but task {recipe.task} reads its files in its own way, without this key"
            other = f"; or derive {task.__name__} from dstrain.task.RecordTask, which applies every key of data"
            yield Fault(key, problem, f"leave it out{'' if task.data_keys else other}")


def _check_positions(task: type[Task]) -> None:
    """Raise TaskError for a `collate` that does not pass on the positions which the one that it overrides takes."""
    owners = [cls for cls in task.__mro__ if "collate" in vars(cls)]
    takes = [takes_positions(vars(cls)["collate"]) for cls in owners]
    if any(takes) and not takes[0]:
        first, other = owners[0].__name__, owners[takes.index(True)].__name__
        raise TaskError(
            f"{first}.collate overrides {other}.collate, which takes the samples' positions in the run; "
            "write `def collate(self, examples, positions=None)`, and pass them on"
        )
