"""Registry of tasks: find one by name, file or module, and make it from a recipe's options."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from dstrain.config.schema import LoraConfig, RunConfig
from dstrain.errors import Fault, TaskError, suggest_name
from dstrain.files import atomic_write, remove_stale_partials
from dstrain.tasks.common.old_names import accept_old_names
from dstrain.tasks.common.options import validate_options
from dstrain.tasks.common.task import Task


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
    if name not in builtin_tasks():
        for task in defined:
            accept_old_names(task)  # first: a method of an old name may be one that was abstract
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
    return found[0]


def _import_task_module(name: str) -> ModuleType:
    if name in builtin_tasks():
        return importlib.import_module(f"dstrain.tasks.{name}")
    try:
        if name.endswith(".py") or "/" in name or name.startswith("."):
            return _import_from_file(Path(name))
        if "." in name:
            return importlib.import_module(name)
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"--task {name}: cannot be imported ({type(error).__name__}: {error}); fix the file") from error
    raise TaskError(f"task '{name}': unknown task; {suggest_name(name, builtin_tasks())}")


TASK_FILE = "task.py"
"""Name of the copy of a task file in run folders and exports. It runs only where --task names it."""


def find_task_file(task: Task) -> Path | None:
    """Return the file of a task that does not come with dstrain, else None."""
    file = Path(inspect.getfile(type(task))).resolve()
    return None if Path(__file__).resolve().parents[2] in file.parents or not file.is_file() else file


def copy_task_file(task: Task, folder: Path) -> None:
    """Copy the file of a task that does not come with dstrain into a folder, to load the folder later."""
    source, kept = find_task_file(task), folder / TASK_FILE
    if source is None or source == kept.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_partials(kept)
    atomic_write(kept, source.read_bytes())


def _import_from_file(path: Path) -> ModuleType:
    path = Path(os.path.realpath(path.expanduser()))
    if not path.is_file():
        raise TaskError(f"--task {path}: is not a file; give the path of a Python file that defines a task")
    unique = f"dstrain_task_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"--task {path}: is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


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
