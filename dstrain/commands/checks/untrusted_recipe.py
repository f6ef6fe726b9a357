"""Checks of untrusted recipes: no code, no environment changes, no network access."""

# A run folder (recipe.yaml) and an exported folder (dstrain_recipe.yaml) contain a recipe that
# another person may have written. Only the command line is trusted: whatever runs code or accesses
# the network must be named there.

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from dstrain.commands.checks.untrusted_folder import (
    NO_CODE_REASON,
    check_configs,
    check_folder,
    config_fault,
    pattern_fault,
)
from dstrain.config import RunConfig, read_recipe
from dstrain.config.schema import LaunchConfig
from dstrain.data.sources.hub import is_hub_name
from dstrain.errors import Fault, UsageError
from dstrain.models.folder.adapter_config import read_adapter
from dstrain.models.folder.location import is_local_path
from dstrain.process_setup import log_stderr
from dstrain.tasks import Task, builtin_tasks, find_task
from dstrain.tasks.common.reference import ReferenceTask
from dstrain.tasks.common.text import TextTask
from dstrain.tasks.safety.reward_models import REWARD_MODEL_KEYS, iter_reward_model_paths

_MODEL_KEYS = ("model.path", "options.ref_model")
"""Keys of models; others name tokenizers and processors."""
NO_FETCH_REASON = "and is not downloaded, since only the folder names it"


def load_folder_recipe(
    file: Path | None, folder_overrides: Sequence[str], overrides: Sequence[str], task: str | None
) -> RunConfig:
    """Return the recipe in a folder, with `folder_overrides` and then --set applied.

    Raises UsageError for a task that is not a packaged one, for trust_remote_code, and for Hub
    names that are not in the cache, unless the command line names them. `launch.env` and
    `launch.slurm` of the folder are dropped.
    """
    config = read_recipe(file, [*folder_overrides, *overrides], task).config
    if file is None:
        return config
    named = {"task"} if task is not None else set()
    # What the command line names is the user's own choice.
    named |= {text.partition("=")[0].strip() for text in overrides}
    if faults := [*_iter_code_faults(file, config, named)]:
        raise UsageError(faults)
    if faults := [*_iter_network_faults(file, config, named)]:
        raise UsageError(faults)
    return _strip_launch(file, config, named)


def _iter_code_faults(file: Path, config: RunConfig, named_keys: set[str]) -> Iterator[Fault]:
    """Yield a fault for each key that would run code and that the command line does not name."""
    model = config.model
    if "task" not in named_keys and config.task not in builtin_tasks():
        yield _custom_task_fault(file, config.task)
    if model.trust_remote_code:
        if not named_keys & {"model", "model.trust_remote_code"}:
            fix = "add --set model.trust_remote_code=true if you trust that code, or =false to continue without it"
            yield Fault(f"{file} model.trust_remote_code", f"is true, and {NO_CODE_REASON}", fix)
        return
    if model.lora is not None and (fault := pattern_fault("targets", model.lora.targets)):
        yield Fault(f"{file} model.lora", fault, "name the modules")
    if fault := config_fault(model.config or {}):
        yield Fault(f"{file} model.config", fault, "remove the key")
    for _, name in _iter_model_references(config, named_keys):
        # A folder that the recipe names may be from the same person.
        if Path(name).expanduser().is_dir():
            check_configs(Path(name).expanduser())


def _custom_task_fault(file: Path, task: str) -> Fault:
    saved_copy = file.parent / "task.py"
    path = saved_copy if saved_copy.is_file() else Path(task)
    argument = shlex.quote(str(path)) if path.is_file() else "FILE"
    problem = f"names code of its own ({task!r}), and {NO_CODE_REASON}"
    return Fault(f"{file} task", problem, f"add --task {argument} if you trust that file")


def _strip_launch(file: Path, config: RunConfig, named_keys: set[str]) -> RunConfig:
    """Return the recipe without launch.env and launch.slurm: they can load code (LD_PRELOAD,
    PYTHONPATH).
    """
    if "launch" in named_keys:
        return config
    own = {"env": [] if "launch.env" not in named_keys else config.launch.env, "slurm": LaunchConfig().slurm}
    if config.launch.env != own["env"]:
        log_stderr(
            f"{file}: launch.env comes from the folder and is not applied; --set 'launch.env=[...]' applies yours"
        )
    return config.model_copy(update={"launch": config.launch.model_copy(update=own)})


def _iter_network_faults(file: Path, config: RunConfig, named_keys: set[str]) -> Iterator[Fault]:
    """Yield a fault for each Hub model that only the folder names and that is not in this machine's
    cache.
    """
    for key, value in _iter_model_references(config, named_keys):
        if _is_hub_model_name(value) and not _is_model_cached(value):
            problem = f"names '{value}' on the hub, which is not in this machine's cache, {NO_FETCH_REASON}"
            yield Fault(f"{file} {key}", problem, f"add --set {key}={value}, or the path of a folder with it")


def _iter_model_references(config: RunConfig, named_keys: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, folder or Hub id) of each model that the recipe names and the command line does
    not.

    An adapter's folder is followed by its base model.
    """
    for key, value in (
        ("model.path", config.model.path),
        ("model.tokenizer", config.model.tokenizer),
        ("model.processor", config.model.processor),
        ("options.ref_model", config.options.get("ref_model")),
        *iter_reward_model_paths(config.options),
    ):
        if not isinstance(value, str) or named_keys & {key, key.rpartition(".")[0], key.split(".")[0]}:
            continue
        yield key, value
        if key in (*_MODEL_KEYS, *REWARD_MODEL_KEYS) and (adapter := read_adapter(value, key)) is not None:
            yield key, adapter.base_model


def saved_config_overrides(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Return --set arguments for the saved config of a run whose base model no longer exists; [] if
    it exists.

    A checkpoint of full fine-tuning has all weights. Raises UsageError if there is no such config,
    or if adapters need the base weights.
    """
    recipe, saved_config = run_dir / "recipe.yaml", run_dir / "model"
    config = read_recipe(recipe, overrides).config
    model, base = config.model, read_recipe(recipe).config.model.path
    if base is None or model.path != base or Path(base).expanduser().is_dir():
        return []
    if _is_hub_model_name(base) and _is_model_cached(base):
        return []
    if model.lora is not None or model.trust_remote_code or not (saved_config / "config.json").is_file():
        if _is_hub_model_name(base):
            return []
        reason = "the adapters need its weights" if model.lora is not None else "its config says how to build the model"
        problem = f"'{base}' does not exist any more, and {reason}"
        raise UsageError(Fault(f"{recipe} model.path", problem, "name its folder: --set model.path=FOLDER"))
    check_folder(saved_config, run_dir=run_dir)
    found = [f"model.path={json.dumps(str(saved_config.resolve()))}"]
    task = find_task(config.task) if config.task in builtin_tasks() else None
    if task is not None and issubclass(task, ReferenceTask) and not config.options.get("ref_model"):
        found.append(f"options.ref_model={json.dumps(base)}")  # also gone: reported where it is needed
    return found


def check_probe_data(folder: Path, recipe_name: str, overrides: Sequence[str]) -> None:
    """Raise UsageError if the probe samples of an export are a Hub dataset that only the folder
    names and is not cached.
    """
    file = next((folder / name for name in ("recipe.yaml", recipe_name) if (folder / name).is_file()), None)
    if file is None or any(text.partition("=")[0].strip() in ("data", "data.eval", "data.train") for text in overrides):
        return
    data = read_recipe(file, overrides).config.data
    for source in [data.eval] if data.eval is not None else data.train:
        if is_hub_name(source.path) and not Path(source.path).is_file() and not _is_dataset_cached(source.path):
            problem = f"names '{source.path}' on the hub, which is not in this machine's cache, {NO_FETCH_REASON}"
            fix = f"add --set data.eval={source.path}, or --set data.eval=FILE to probe with"
            raise UsageError(Fault(f"{file} data", problem, fix))


def _is_dataset_cached(name: str) -> bool:
    """Return True if the datasets library has cached it: its folder exists (HF_DATASETS_CACHE in
    datasets/config.py).
    """
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    place = Path(os.path.expanduser(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets"))
    return (place / name.replace("/", "___")).is_dir()


def _is_hub_model_name(name: str) -> bool:
    """Return True if transformers would look for the name on the Hub, also for `gpt2`."""
    return bool(name) and not is_local_path(name) and not Path(name).is_dir()


def _is_model_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "adapter_config.json", "tokenizer_config.json", "processor_config.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def is_module_export(folder: Path) -> bool:
    """Return True if a folder is the export of a module that is not a transformers model."""
    exists = [(folder / name).is_file() for name in ("dstrain_recipe.yaml", "config.json", "adapter_config.json")]
    return exists == [True, False, False]


def check_head(task: Task, folder: Path) -> None:
    """Raise UsageError if an exported model lacks its head, which would be initialized at random."""
    if isinstance(task, TextTask) and task.checks.validator.newly_initialized:
        name = task.checks.validator.newly_initialized[0]
        raise UsageError(
            f"{folder}: its files hold no {name}, which task {task.recipe.task} needs; give a trained model's folder"
        )
