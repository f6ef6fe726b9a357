"""Checks of folders and recipes that somebody else wrote, before they are used."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.config import RunConfig, read_recipe
from dstrain.config.read import read_yaml
from dstrain.config.schema import LaunchConfig
from dstrain.data.sources.hub import is_hub_name
from dstrain.errors import Fault, PresetError, RecipeError, UsageError
from dstrain.files import MAX_JSON_BYTES, parse_json, read_limited
from dstrain.models.folder import find_hub_code, is_local_path, read_adapter, wrong_size_fault
from dstrain.preset import Preset, check_ds_config
from dstrain.process_setup import log_stderr
from dstrain.tasks import Task, TaskOptions, builtin_tasks, find_task
from dstrain.tasks.common.judge import JUDGE_KEY

FORWARD_KEYS = ("zero_optimization", "aio", "bf16", "fp16", "data_types", "communication_data_type")
"""Keys of a run's DeepSpeed JSON that apply to forward passes; others are ignored."""
NO_CODE_REASON = "code that only the folder names is not run"


def read_forward_preset(folder: Path) -> Preset:
    """Return the preset in a run's ds_config.json, with the keys for forward passes only and no
    paths. Raises UsageError.
    """
    file = folder / "ds_config.json"
    # An allow list: other keys may make DeepSpeed write files.
    block = {key: value for key, value in read_json_object(file).items() if key in FORWARD_KEYS}
    zero = block.get("zero_optimization")
    if isinstance(zero, dict):
        parts = {name: dict(value) for name, value in zero.items() if isinstance(value, dict)}
        for part in parts.values():
            # DeepSpeed empties that folder.
            part.pop("nvme_path", None)
        block["zero_optimization"] = {**zero, **parts}
    try:
        return Preset("ds_config", file, check_ds_config(file, block))
    except PresetError as error:
        raise PresetError(f"{error}\ngive another preset with --ds-config NAME") from None


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an untrusted folder. Raises UsageError."""
    try:
        if (problem := _find_file_fault(file)) is not None:
            raise UsageError(f"{file}: {problem}; copy the folder again")
        value = parse_json(read_limited(file, MAX_JSON_BYTES))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); copy the folder again") from None
    except ValueError as error:
        raise UsageError(f"{file}: not valid JSON ({error}); copy the folder again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file}: is not a JSON object; copy the folder again")
    return value


def is_precision_enabled(folder: Path, precision: str) -> bool:
    """Return True if the run's precision is the given one, bf16 or fp16. Raises UsageError."""
    block = read_json_object(folder / "ds_config.json").get(precision)
    return isinstance(block, dict) and block.get("enabled") is True


def check_folder(folder: Path, trust_remote_code: bool = False, run_dir: Path | None = None) -> None:
    """Raise UsageError for a model or tokenizer folder with unsafe files.

    These are special files, links to files outside of the folder other than weights, and configs
    that import modules. `run_dir`: the run folder that contains the folder, if any.
    """
    root = Path(os.path.realpath(run_dir or folder))
    # The Hub's cache links snapshots/REVISION/FILE to blobs/HASH.
    home = root.parent.parent if root.parent.name == "snapshots" else root
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if (problem := _find_file_fault(path)) is not None:
            raise UsageError(f"{path}: {problem}; remove it, or copy the folder again")
        outside = not Path(os.path.realpath(path)).is_relative_to(home)
        if outside and path.suffix != ".safetensors":
            raise UsageError(
                f"{path}: is a link to {os.path.realpath(path)}, outside of the folder; "
                f"if you trust it, copy the folder with `cp -rL {shlex.quote(str(folder))} COPY` and use the copy"
            )
    if not trust_remote_code:
        check_configs(folder)


def check_configs(folder: Path) -> None:
    """Raise UsageError for JSON files that make a library import or fetch a module, and for sizes that no model has."""
    for name, check in (("adapter_config.json", _adapter_fault), ("config.json", config_fault)):
        if (folder / name).is_file() and (fault := check(read_json_object(folder / name))):
            raise UsageError(f"{folder / name}: {fault}; remove the key")
    file = folder / "config.json"
    if file.is_file() and (wrong := wrong_size_fault(read_json_object(file), str(file))) is not None:
        raise UsageError(wrong)


def check_no_pickles(folder: Path, recipe_name: str) -> None:
    """Raise UsageError for pickles in a folder that dstrain wrote (it has `recipe_name`), and for
    pickled weights in others.
    """
    from dstrain.models.weights import open_tensors
    from dstrain.training.state import manifest

    if (folder / recipe_name).is_file():
        manifest.check_no_pickles(folder)
    if any(folder.glob("*.safetensors")):
        return
    try:
        open_tensors(sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model.bin")]))
    except RecipeError as error:
        raise UsageError("\n".join(f"{fault.problem}; {fault.fix}" for fault in error.faults)) from error


def _find_file_fault(path: Path) -> str | None:
    """Return why a path is not a regular file; None if it is one, or a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot be read ({error.strerror})" if os.path.islink(path) else f"does not exist ({error.strerror})"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is not a regular file"


def _adapter_fault(config: Mapping[str, Any]) -> str:
    """Return why an adapter config is unsafe, else ''.

    peft imports the module in megatron_core (peft/tuners/lora/tp_layer.py,
    importlib.import_module(config.megatron_core)).
    """
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        return f"peft_type is {config['peft_type']!r}, but dstrain supports only LORA"
    if config.get("megatron_config"):
        return "megatron_config names a module to import"
    for key in _MODULE_NAME_KEYS:
        value = config.get(key)
        if not isinstance(value, (str, list, dict, type(None))):
            return f"{key} is {value!r}, but must be names of modules"
    return ""


_MODULE_NAME_KEYS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")


def config_fault(config: Mapping[str, Any]) -> str:
    """Return a fault if a model's config names code on the Hub, else ''."""
    found = find_hub_code(config)
    return f"{found}, and {NO_CODE_REASON}" if found else ""


# A run folder (recipe.yaml) and an exported folder (dstrain_recipe.yaml) contain a recipe that
# another person may have written. Only the command line is trusted: whatever runs code or accesses
# the network must be named there.


NO_FETCH_REASON = "and is not downloaded, since only the folder names it"


def load_folder_recipe(
    file: Path | None, folder_overrides: Sequence[str], overrides: Sequence[str], task: str | None
) -> RunConfig:
    """Return the recipe in a folder, with `folder_overrides` and then --set applied.

    Raises UsageError for a task that is not a packaged one, for trust_remote_code, and for Hub
    names that are not in the cache, unless the command line names them. `launch.env` and
    `launch.slurm` of the folder are dropped, and what only the folder's own task knows where `task` is another one.
    """
    folder_overrides = [*_drop_task_settings(file, task), *folder_overrides]
    config = read_recipe(file, [*folder_overrides, *overrides], task, options=TaskOptions()).config
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


def _drop_task_settings(file: Path | None, task: str | None) -> list[str]:
    """Return --set arguments that remove the options and metrics of a folder's task, where `task` is another one.

    A task in a file has no other name than its file, and keeps them.
    """
    if file is None or task not in builtin_tasks():
        return []
    values = read_yaml(file).values
    trained = values.get("task")
    if trained == task or trained not in builtin_tasks():
        return []
    options = values.get("options")
    names = sorted(map(str, options)) if isinstance(options, Mapping) else []
    if names and "RANK" not in os.environ:  # the process that starts the ranks has said so
        log_once(f"--task {task}: {file} is of task {trained}, whose options are not used ({', '.join(names)})")
    return ["options={}", "eval.metric=loss", "eval.best=min", "eval.generate=null"]


@cache
def log_once(line: str) -> None:
    """Write a line to the standard error, the first time that this process has it."""
    log_stderr(line)


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
    """Return the recipe without launch.env and launch.slurm: they can load code (LD_PRELOAD, PYTHONPATH)."""
    if "launch" in named_keys:
        return config
    own = {"env": [] if "launch.env" not in named_keys else config.launch.env, "slurm": LaunchConfig().slurm}
    if config.launch.env != own["env"]:
        log_stderr(
            f"{file}: launch.env comes from the folder and is not applied; --set 'launch.env=[...]' applies yours"
        )
    return config.model_copy(update={"launch": config.launch.model_copy(update=own)})


def _iter_network_faults(file: Path, config: RunConfig, named_keys: set[str]) -> Iterator[Fault]:
    """Yield a fault for each Hub model that only the folder names and that is not in this machine's cache."""
    for key, value in _iter_model_references(config, named_keys):
        if _is_hub_model_name(value) and not _is_model_cached(value):
            problem = f"names '{value}' on the hub, which is not in this machine's cache, {NO_FETCH_REASON}"
            yield Fault(f"{file} {key}", problem, f"add --set {key}={value}, or the path of a folder with it")


def _iter_model_references(config: RunConfig, named_keys: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, folder or Hub id) of each model that the recipe names and the command line does not.

    An adapter's folder is followed by its base model.
    """
    for key, value in (
        ("model.path", config.model.path),
        ("model.tokenizer", config.model.tokenizer),
        ("model.processor", config.model.processor),
        (JUDGE_KEY, config.eval.generate and config.eval.generate.reward_model),
        *_iter_path_options(config, named_keys),
    ):
        if not isinstance(value, str) or named_keys & {key, key.rpartition(".")[0], key.split(".")[0]}:
            continue
        yield key, value
        if key not in ("model.tokenizer", "model.processor") and (adapter := read_adapter(value, key)) is not None:
            yield key, adapter.base_model


def _iter_path_options(config: RunConfig, named_keys: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each option that names a model, of a task whose code may run."""
    if config.task not in builtin_tasks() and "task" not in named_keys:
        return
    for option in find_task(config.task).path_options:
        value: Any = config.options
        for name in option.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        yield f"options.{option}", value


def saved_config_overrides(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Return --set arguments for the saved config of a run whose base model no longer exists; [] if it exists.

    A checkpoint of full fine-tuning has all weights. Raises UsageError if there is no such config,
    or if adapters need the base weights.
    """
    recipe, saved_config = run_dir / "recipe.yaml", run_dir / "model"
    config = read_recipe(recipe, overrides, options=TaskOptions()).config
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
    found = [f"model.path={json.dumps(str(saved_config.resolve()))}", "model.revision=null"]
    task = find_task(config.task) if config.task in builtin_tasks() else None
    if task is not None and "ref_model" in task.path_options and not config.options.get("ref_model"):
        found.append(f"options.ref_model={json.dumps(base)}")  # also gone: reported where it is needed
    return found


def check_probe_data(folder: Path, recipe_name: str, overrides: Sequence[str]) -> None:
    """Raise UsageError if the probe samples of an export are a Hub dataset that only the folder
    names and is not cached.
    """
    file = next((folder / name for name in ("recipe.yaml", recipe_name) if (folder / name).is_file()), None)
    if file is None or any(text.partition("=")[0].strip() in ("data", "data.eval", "data.train") for text in overrides):
        return
    data = read_recipe(file, overrides, options=TaskOptions()).config.data
    for source in [data.eval] if data.eval is not None else data.train:
        if is_hub_name(source.path) and not Path(source.path).is_file() and not _is_dataset_cached(source.path):
            problem = f"names '{source.path}' on the hub, which is not in this machine's cache, {NO_FETCH_REASON}"
            fix = f"add --set data.eval={source.path}, or --set data.eval=FILE to probe with"
            raise UsageError(Fault(f"{file} data", problem, fix))


def _is_dataset_cached(name: str) -> bool:
    """Return True if the datasets library has cached it: its folder exists (HF_DATASETS_CACHE in datasets/config.py)."""
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
    if names := task.checks.newly_initialized():
        name = names[0]
        raise UsageError(
            f"{folder}: its files hold no {name}, which task {task.recipe.task} needs; give a trained model's folder"
        )
