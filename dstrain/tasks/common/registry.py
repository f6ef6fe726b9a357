"""Find a task by name, file or module, import its file, and make it from a recipe's options."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dstrain.cache import file_digest
from dstrain.config.aliases import describe_method
from dstrain.config.schema import DataConfig, LoraConfig, RunConfig
from dstrain.data.dataset import takes_positions
from dstrain.errors import Fault, RecipeError, TaskError, describe_fault, suggest_name
from dstrain.files import atomic_write, remove_stale_partials
from dstrain.models.folder import read_adapter
from dstrain.tasks.common.task import (
    DATA_KEYS,
    Task,
    find_block,
    get_option_fields,
    option_types,
    task_options,
    validate_options,
)

TASK_FILE = "task.py"
"""Name of the copy of a task file in run folders and exports. It runs only where --task names it."""
_RESERVED_NAMES = (TASK_FILE, "checkpoints", "logs")
"""Names in a run folder that the modules beside a task file cannot have."""
_SHARED_FOLDERS = {"common", "safety"}
"""Folders of dstrain/tasks that hold parts of several tasks."""
_DSTRAIN = Path(__file__).resolve().parents[2]


def import_task_file(path: Path) -> ModuleType:
    """Return the module of a task file, imported once. Raises TaskError, and what the file raises.

    Like a script it finds the modules of its folder: the folder is in front of sys.path while the file is imported,
    and last in it afterwards, for imports inside functions.
    """
    path = Path(os.path.realpath(path.expanduser()))
    if not path.is_file():
        raise TaskError(f"--task {path}: is not a file; give the path of a Python file that defines a task")
    if path.suffix != ".py":
        raise TaskError(f"--task {path}: is not a Python file; its name must end in .py")
    name = f"dstrain_task_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _check_module_names(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module, folder, known = importlib.util.module_from_spec(spec), str(path.parent), {*sys.modules}
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # The modules beside it too: they may be what the user mends.
        for other in {*sys.modules} - known:
            if _is_below(path.parent, sys.modules[other]):
                del sys.modules[other]
        raise
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
    return module


def _is_below(folder: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).parents


def _check_module_names(path: Path) -> None:
    """Raise TaskError where a module beside a task file imports it, or has the name of another module.

    Python might take the other one, or hide it from libraries.
    """
    importlib.invalidate_caches()
    for file, importing in find_imported_files(path).items():
        if file == path:  # a copy of it has another name
            problem = f"{importing.name} imports this file, which imports {importing.name}"
            raise TaskError(f"--task {path}: {problem}; move what both need into a third file")
        relative = file.relative_to(path.parent)
        name = relative.parts[0].removesuffix(".py")
        try:
            other = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            other = None
        if other is None or other.origin is None:
            continue
        beside = file if len(relative.parts) == 1 else path.parent / name / "__init__.py"
        origin = Path(other.origin)
        is_copy = origin.is_file() and beside.is_file() and origin.read_bytes() == beside.read_bytes()
        if not is_copy:
            where = f"as {origin}" if origin.is_file() else "in Python itself"
            problem = f"imports {relative} beside it, and there is a module {name} {where}"
            raise TaskError(f"--task {path}: {problem}; rename yours")


def find_task_file(task: type[Task]) -> Path | None:
    """Return the file of a task that does not come with dstrain, else None."""
    file = Path(inspect.getfile(task)).resolve()
    return None if _DSTRAIN in file.parents or not file.is_file() else file


def find_task_files(task: type[Task]) -> dict[str, Path]:
    """Return the files of a user's task by their names in a copy: the task file, and what it imports from its folder.

    Found by reading the import statements, also those inside functions: it does not depend on what has run. Empty for
    a task that comes with dstrain. Raises TaskError for a name that a copy cannot have.
    """
    first = find_task_file(task)
    if first is None:
        return {}
    files = {TASK_FILE: first}
    for file in find_imported_files(first):
        name = file.relative_to(first.parent).as_posix()
        if name.partition("/")[0] in _RESERVED_NAMES:
            problem = f"imports {name} beside it, and a run folder, which gets a copy, uses that name"
            raise TaskError(f"--task {first}: {problem}; rename it")
        files[name] = file
    return files


def find_imported_files(first: Path) -> dict[Path, Path]:
    """Return the files of a task file's folder that it imports, or that these import, each with a file that imports it."""
    importers, pending = dict[Path, Path](), [first]
    while pending:
        importing = pending.pop()
        for file in _iter_imported_files(importing, first.parent):
            if file not in importers:
                importers[file] = importing
                pending.append(file)
    return importers


def digest_task_files(task: type[Task]) -> str | None:
    """Return a digest of the files of a user's task, the same for a copy; None for a task that comes with dstrain."""
    if not (files := find_task_files(task)):
        return None
    lines = [f"{name} {file_digest(file)}" for name, file in sorted(files.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def copy_task_files(task: Task, folder: Path) -> None:
    """Copy the files of a user's task into a folder, to load the folder later."""
    for name, source in reversed(find_task_files(type(task)).items()):
        copy = folder / name
        if source == copy.resolve():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_partials(copy)
        atomic_write(copy, source.read_bytes())


def _iter_imported_files(file: Path, root: Path) -> Iterator[Path]:
    """Yield the files in the folder `root` that a file's import statements name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        names, start = list[str](), root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            names = [f"{base}{alias.name}" for alias in node.names]
            start = file.parents[node.level - 1] if node.level else root
        if start == root or root in start.parents:
            for name in names:
                yield from _iter_module_files(start, name.split("."))


def _iter_module_files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the file of the dotted module `parts` of a folder, and those of the packages that it is in."""
    for end in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:end])
        file = next((file for file in _module_files(place) if file.is_file()), None)
        if file is not None and _DSTRAIN not in file.resolve().parents:
            yield file
        if file is None and not place.is_dir():
            return


def _module_files(place: Path) -> tuple[Path, Path]:
    """Return the files that the module at a path may have; a package is found first."""
    return place / "__init__.py", place.with_name(f"{place.name}.py")


def builtin_tasks() -> list[str]:
    """Return the names of the tasks that come with dstrain: modules of dstrain/tasks, and folders with readers and model."""
    names = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parents[1])])}
    return sorted(names - _SHARED_FOLDERS)


def find_task(name: str) -> type[Task]:
    """Return the task class of a packaged task, a file path, or a dotted module. Raises TaskError."""
    return _find_task(os.path.abspath(os.path.expanduser(name)) if _is_file_name(name) else name)


@cache
def _find_task(name: str) -> type[Task]:
    module = _import_task_module(name)
    concrete = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Task)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(concrete) != 1:
        names = ", ".join(cls.__name__ for cls in concrete) or "none"
        raise TaskError(
            f"--task {name}: defines {names}; a task file defines one concrete subclass of dstrain.tasks.Task"
        )
    if name not in builtin_tasks():
        check_task_class(name, concrete[0])
    return concrete[0]


def check_task_class(name: str, task: type[Task]) -> None:
    """Raise TaskError for mistakes in the class of a user's task."""
    if not dataclasses.is_dataclass(task) or "__dataclass_fields__" not in vars(task):
        raise TaskError(
            f"--task {name}: {task.__name__} is not a dataclass; write @dataclass(frozen=True, kw_only=True) above it"
        )
    owners = [cls for cls in task.__mro__ if "collate" in vars(cls)]
    takes = [takes_positions(vars(cls)["collate"]) for cls in owners]
    if any(takes) and not takes[0]:
        first, other = owners[0].__name__, owners[takes.index(True)].__name__
        raise TaskError(
            f"{first}.collate overrides {other}.collate, which takes the samples' positions in the run; "
            "write `def collate(self, examples, positions=None)`, and pass them on"
        )
    options = [option.name for option in get_option_fields(task)]
    for path in task.path_options:
        if path.partition(".")[0] not in options:
            problem = f"path_options names '{path}', which is no option of {task.__name__}"
            raise TaskError(f"--task {name}: {problem}; {suggest_name(path, options)}")


def _is_file_name(name: str) -> bool:
    return name.endswith(".py") or "/" in name or name.startswith(".")


def _import_task_module(name: str) -> ModuleType:
    if name in builtin_tasks():
        is_folder = (Path(__file__).parents[1] / name).is_dir()
        return importlib.import_module(f"dstrain.tasks.{name}{'.task' if is_folder else ''}")
    try:
        if _is_file_name(name):
            return import_task_file(Path(name))
        if "." in name:
            return importlib.import_module(name)
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"--task {name}: cannot be imported ({describe_fault(error)}); fix the file") from error
    raise TaskError(f"task '{name}': unknown task; {describe_method(name) or suggest_name(name, builtin_tasks())}")


class TaskOptions:
    """The options of packaged tasks, for messages and values of a recipe that is being read (config.read.OptionLookup).

    Not those of a task file: it would be run before anyone has said that it may be.
    """

    def find_type(self, task: str, option: str) -> Any:
        """Return the annotation of an option of a task, or of one in a block of options; None for an unknown one."""
        owner: Any = find_task(task) if task in builtin_tasks() else None
        annotation: Any = None
        for name in option.split("."):
            annotation = None if owner is None else option_types(owner).get(name)
            owner = find_block(annotation)
        return annotation

    def find_place(self, task: str, name: str) -> str:
        """Return `options.NAME`, with the tasks that have it where the task has none of that name; else an empty text."""
        key = _find_option_key(find_task(task), name) if task in builtin_tasks() else ""
        if key:
            return key
        keys = {other: _find_option_key(find_task(other), name) for other in builtin_tasks()}
        owners = [other for other, key in keys.items() if key]
        return f"{keys[owners[0]]}, of {' and '.join(owners)}" if owners else ""


def _find_option_key(task: type[Task], name: str) -> str:
    """Return the key of a task's option of that name, which may be in a block of options; empty if it has none."""
    options = task_options(task)
    keys = [f"options.{option.name}" for option in options if option.name == name]
    keys += [f"options.{option.name}.{one.name}" for option in options for one in option.nested if one.name == name]
    return keys[0] if keys else ""


LORA_LR_FACTOR = 10.0
"""Factor of LoRA's default learning rate over that of full training; sources are in docs/optimizers.md."""


def default_learning_rate(task: type[Task], use_lora: bool) -> float:
    """Return the task's default peak learning rate, for full training or for LoRA."""
    return float(f"{task.learning_rate * (LORA_LR_FACTOR if use_lora else 1.0):.6g}")


def fill_defaults(recipe: RunConfig, task: type[Task]) -> RunConfig:
    """Return the recipe with its task's adapters and learning rate where it does not write them.

    A null in model.lora is written: it asks for no adapters. With model.lora.create_new_adapter: false the adapters are
    those of the folder in model.path. Raises RecipeError.
    """
    if "lora" in recipe.model.model_fields_set:
        recipe = _fill_from_adapter(recipe)
    elif task.default_lora is not None:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": task.default_lora})})
    if recipe.optim.lr is None:
        lr = default_learning_rate(task, recipe.model.lora is not None)
        recipe = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"lr": lr})})
    return recipe


def _fill_from_adapter(recipe: RunConfig) -> RunConfig:
    """Return the recipe with rank, alpha, targets and dora of the adapter that is trained on. Raises RecipeError."""
    model = recipe.model
    if model.lora is None or model.lora.create_new_adapter:
        return recipe
    adapter, key = read_adapter(model.path), "model.lora.create_new_adapter"
    if adapter is None:
        problem = f"is false, but model.path ({model.path}) is no adapter folder"
        raise RecipeError(Fault(key, problem, "name the folder of an adapter (adapter_config.json), or leave it out"))
    settings = adapter.settings
    found = {
        "rank": settings.get("r", 8),
        "alpha": float(settings.get("lora_alpha", 8)),
        "targets": settings.get("target_modules", "all-linear"),
        "dora": settings.get("use_dora", False),
        "use_rslora": settings.get("use_rslora", False),
    }
    defaults = LoraConfig()
    faults = [
        Fault(f"model.lora.{name}", f"is {own!r}, but the adapter in {model.path} has {value!r}", "leave it out")
        for name, value in found.items()
        if (own := getattr(model.lora, name)) != getattr(defaults, name)
        and (sorted(own) != sorted(value) if isinstance(own, list) and isinstance(value, list) else own != value)
    ]
    if faults:
        raise RecipeError(faults)
    lora = model.lora.model_copy(update=found)
    return recipe.model_copy(update={"model": model.model_copy(update={"lora": lora})})


def make_task(recipe: RunConfig) -> Task:
    """Return the recipe's task with validated options. Raises TaskError with every fault."""
    task = find_task(recipe.task)
    recipe = fill_defaults(recipe, task)
    if recipe.batch.packing is True and not getattr(task, "packs_batches", False):
        problem = f"is true, but task {recipe.task} has padded rows only"
        raise TaskError(Fault("batch.packing", problem, "leave it out"))
    if recipe.model.quantize is not None and recipe.model.lora is None:
        problem = f"is {recipe.model.quantize}, but quantized weights cannot be trained, only adapters on them"
        raise TaskError(Fault("model.quantize", problem, "add model.lora, e.g. `lora: {rank: 16}`, or leave it out"))
    if recipe.optim.loraplus_lr_ratio is not None and recipe.model.lora is None:
        problem = f"is {recipe.optim.loraplus_lr_ratio:g}, but the run has no adapters"
        raise TaskError(
            Fault("optim.loraplus_lr_ratio", problem, "add model.lora, e.g. `lora: {rank: 16}`, or remove it")
        )
    if recipe.model.neftune_noise_alpha is not None and not getattr(task, "packs_batches", False):
        problem = f"is set, but task {recipe.task} does not read rows of tokens alone"
        raise TaskError(Fault("model.neftune_noise_alpha", problem, "remove it"))
    if faults := list(_find_unused_keys(task, recipe)):
        raise TaskError(faults)
    values = validate_options(task, recipe)
    task = task.select_class(values)
    try:
        made = task(recipe=recipe, **values)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"options of task {recipe.task}: {error}; `dstrain tasks {recipe.task}` documents them"
        ) from error
    _check_generation(made)
    generated = () if made.prompts is None else made.prompts.metric_names
    left_out = {*made.default_answer_metrics} - {*generated}
    names = [name for name in made.metric_names if name not in left_out]
    known, metric = ("loss", *names, *generated), recipe.eval.metric
    if made.metric_names and metric not in known:
        raise TaskError(
            Fault("eval.metric", f"'{metric}' is not a metric of task {recipe.task}", _suggest_metric(metric, known))
        )
    return made


ACCURACIES = ("accuracy", "exact_match", "pattern_accuracy", "token_accuracy")
"""Names of the accuracy of tasks; of one that has several, the first counts."""


def _suggest_metric(name: str, known: Sequence[str]) -> str:
    """Return the metric that another trainer's name of a metric, such as eval_accuracy, means here."""
    plain = name.removeprefix("eval_")
    names = [plain, *(ACCURACIES if plain in ("accuracy", "acc") else ())]
    ours = next((one for one in names if one in known), None)
    return suggest_name(name, known) if ours is None else f"here it is {ours}"


def _check_generation(made: Task) -> None:
    """Raise TaskError where eval.generate asks for what the task does not do."""
    generate, name = made.recipe.eval.generate, made.recipe.task
    if generate is None:
        return
    if made.prompts is None or made.model_source is None or not made.model_source.can_generate:
        raise TaskError(Fault("eval.generate", f"is set, but task {name} generates no text", "leave it out"))
    for metric in generate.metrics or ():
        if metric not in made.answer_metrics:
            problem = f"'{metric}' is not a metric of the generated answers of task {name}"
            raise TaskError(Fault("eval.generate.metrics", problem, suggest_name(metric, [*made.answer_metrics])))
        if metric in made.metric_names and metric not in made.default_answer_metrics:
            problem = f"'{metric}' is a metric of task {name} already, of the answers of the data"
            raise TaskError(Fault("eval.generate.metrics", problem, "remove it"))
    if generate.metrics is None and not made.prompts.metric_names:
        problem = "names neither metrics nor a reward_model, so there is nothing to compute"
        raise TaskError(Fault("eval.generate", problem, "write metrics: [anls], or reward_model: FOLDER"))


def _find_unused_keys(task: type[Task], recipe: RunConfig) -> Iterator[Fault]:
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
