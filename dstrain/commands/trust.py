"""What a folder that someone hands over may decide: nothing that runs code, changes an environment or asks the network.

A run folder (recipe.yaml) and an exported one (dstrain_recipe.yaml) bring a recipe of their own. It is text from somebody
else. What the user writes on the command line is the user's word; what runs code needs that word.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.config import RunConfig, read_recipe
from dstrain.config.schema import LaunchConfig
from dstrain.data.hub import is_hub_name
from dstrain.data.store import say
from dstrain.errors import Fault, PresetError, RecipeError, UsageError
from dstrain.preset import Preset, check_block
from dstrain.tasks import Task, find_task, packaged_tasks
from dstrain.tasks.policy import PolicyTask
from dstrain.tasks.text import TextTask

HOLDING = ("zero_optimization", "aio", "bf16", "fp16", "data_types", "communication_data_type")
"""What the JSON of a run may say of how its model is held for forward passes."""
WEIGHTS = (".safetensors",)
NO_FETCH = "and nothing is fetched because a folder says so"
MOST_JSON = 64 << 20
"""Bytes of a JSON file that is looked into; a config has some thousands."""
NO_WORD = "nothing runs because a folder says so"


def folder_recipe(file: Path | None, own: Sequence[str], sets: Sequence[str], task: str | None) -> RunConfig:
    """The recipe in a folder with `own` and then --set applied, where nothing in it runs code or asks the network.

    Raises UsageError for a task that is no packaged one, for trust_remote_code, and for names on the hub that are not
    in the cache, unless the command line names them. `launch.env` and `launch.slurm` are the command line's alone.
    """
    config = read_recipe(file, [*own, *sets], task).config
    if file is None:
        return config
    named = {"task"} if task is not None else set()
    named |= {text.partition("=")[0].strip() for text in sets}
    if faults := [*_runs_code(file, config, named)]:
        raise UsageError(faults)
    if faults := [*_asks_network(file, config, named)]:
        raise UsageError(faults)
    return _without_launch(file, config, named)


def _runs_code(file: Path, config: RunConfig, named: set[str]) -> Iterator[Fault]:
    """A fault for each thing in the recipe that would run code and that the command line does not name."""
    model = config.model
    if "task" not in named and config.task not in packaged_tasks():
        yield _own_code(file, config.task)
    if model.trust_remote_code:
        if not named & {"model", "model.trust_remote_code"}:
            mend = "add --set model.trust_remote_code=true if you trust that code, or =false to go on without it"
            yield Fault(f"{file} model.trust_remote_code", f"is true, and {NO_WORD}", mend)
        return
    if fault := _config_fault(model.config or {}):
        yield Fault(f"{file} model.config", fault, "remove the key")
    if model.path is not None and not named & {"model", "model.path"} and Path(model.path).expanduser().is_dir():
        _check_imports(Path(model.path).expanduser())


def _own_code(file: Path, task: str) -> Fault:
    kept = file.parent / "task.py"
    there = kept if kept.is_file() else Path(task)
    word = shlex.quote(str(there)) if there.is_file() else "FILE"
    problem = f"names code of its own ({task!r}), and {NO_WORD}"
    return Fault(f"{file} task", problem, f"add --task {word} if you trust that file")


def _without_launch(file: Path, config: RunConfig, named: set[str]) -> RunConfig:
    """The recipe without what goes to a shell or an environment, which can load code (LD_PRELOAD, PYTHONPATH)."""
    if "launch" in named:
        return config
    own = {"env": [] if "launch.env" not in named else config.launch.env, "slurm": LaunchConfig().slurm}
    if config.launch.env != own["env"]:
        say(f"{file}: launch.env comes from the folder and is not applied; --set 'launch.env=[...]' applies yours")
    return config.model_copy(update={"launch": config.launch.model_copy(update=own)})


def _asks_network(file: Path, config: RunConfig, named: set[str]) -> Iterator[Fault]:
    """A fault for each model on the hub that the folder names, the command line does not, and this machine does not have."""
    model = config.model
    for key, value in (
        ("model.path", model.path),
        ("model.tokenizer", model.tokenizer),
        ("model.processor", model.processor),
        ("options.ref_model", config.options.get("ref_model")),
    ):
        own = key in named or key.split(".")[0] in named
        if own or not isinstance(value, str) or not _names_hub(value):
            continue
        if not _in_hub_cache(value):
            problem = f"names '{value}' on the hub, which is not in this machine's cache, {NO_FETCH}"
            yield Fault(f"{file} {key}", problem, f"add --set {key}={value}, or the path of a folder with it")


def in_place_of_base(run: Path, sets: Sequence[str]) -> list[str]:
    """Where the model that a run began with is gone: the config that the run keeps, as --set takes it.

    A checkpoint of a full fine-tuning has all weights. Raises UsageError where there is no such config, or adapters need
    the weights.
    """
    recipe, kept = run / "recipe.yaml", run / "model"
    config = read_recipe(recipe, sets).config
    model, base = config.model, read_recipe(recipe).config.model.path
    if base is None or model.path != base or Path(base).expanduser().is_dir():
        return []
    if _names_hub(base) and _in_hub_cache(base):
        return []
    if model.lora is not None or model.trust_remote_code or not (kept / "config.json").is_file():
        if _names_hub(base):
            return []
        needs = (
            "the adapters lie on its weights" if model.lora is not None else "its config says how to build the model"
        )
        problem = f"'{base}' is not there any more, and {needs}"
        raise UsageError(Fault(f"{recipe} model.path", problem, "name its folder: --set model.path=FOLDER"))
    check_folder(kept, run=run)
    found = [f"model.path={json.dumps(str(kept.resolve()))}"]
    task = find_task(config.task) if config.task in packaged_tasks() else None
    if task is not None and issubclass(task, PolicyTask) and not config.options.get("ref_model"):
        found.append(f"options.ref_model={json.dumps(base)}")  # which is gone too, and asked for where it is needed
    return found


def check_probes(folder: Path, own: str, sets: Sequence[str]) -> None:
    """Raise UsageError where the samples to probe an export with are a dataset that only the folder names, and is not here."""
    file = next((folder / name for name in ("recipe.yaml", own) if (folder / name).is_file()), None)
    if file is None or any(text.partition("=")[0].strip() in ("data", "data.eval", "data.train") for text in sets):
        return
    data = read_recipe(file, sets).config.data
    for source in [data.eval] if data.eval is not None else data.train:
        if is_hub_name(source.path) and not Path(source.path).is_file() and not _dataset_in_cache(source.path):
            problem = f"names '{source.path}' on the hub, which is not in this machine's cache, {NO_FETCH}"
            mend = f"add --set data.eval={source.path}, or --set data.eval=FILE to probe with"
            raise UsageError(Fault(f"{file} data", problem, mend))


def _dataset_in_cache(name: str) -> bool:
    """Whether the datasets library has kept it (datasets/config.py, HF_DATASETS_CACHE): no more than its folder is looked for."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    place = Path(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets").expanduser()
    return (place / name.replace("/", "___")).is_dir()


def _names_hub(name: str) -> bool:
    """Whether transformers would take a name for one on the hub, `gpt2` too."""
    local = name.startswith((".", "/", "~")) or name.count("/") > 1
    return bool(name) and not local and not Path(name).is_dir()


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "adapter_config.json", "tokenizer_config.json", "processor_config.json")
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)


def holding_of(folder: Path) -> Preset:
    """How a run's model was held, from its ds_config.json: no more than forward passes need, and no path. Raises UsageError."""
    file = folder / "ds_config.json"
    block = {key: value for key, value in read_object(file).items() if key in HOLDING}
    zero = block.get("zero_optimization")
    if isinstance(zero, dict):
        parts = {name: dict(value) for name, value in zero.items() if isinstance(value, dict)}
        for part in parts.values():
            part.pop("nvme_path", None)
        block["zero_optimization"] = {**zero, **parts}
    try:
        return Preset("ds_config", file, check_block(file, block))
    except PresetError as error:
        raise PresetError(f"{error}\n--ds-config NAME holds the model another way") from None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a folder. Raises UsageError."""
    try:
        if (problem := _irregular(file)) is not None:
            raise UsageError(f"{file}: {problem}; copy the folder again")
        if file.stat().st_size > MOST_JSON:
            raise UsageError(
                f"{file}: has more than {MOST_JSON >> 20} MiB, which no such file has; copy the folder again"
            )
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); copy the folder again") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid JSON ({error}); copy the folder again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file}: holds no JSON object; copy the folder again")
    return value


def enabled(folder: Path, precision: str) -> bool:
    """Whether a run computed in bf16 or fp16. Raises UsageError."""
    block = read_object(folder / "ds_config.json").get(precision)
    return isinstance(block, dict) and block.get("enabled") is True


def check_folder(folder: Path, trust_remote_code: bool = False, run: Path | None = None) -> None:
    """Raise UsageError for what a folder of a tokenizer or a model must not hold. `run`: the run folder that it is a part of.

    Files that are no regular files, links to text outside of the folder, adapters and attention that import modules.
    """
    root = Path(os.path.realpath(run or folder))
    # The hub's cache links snapshots/REVISION/FILE to blobs/HASH beside it.
    home = root.parent.parent if root.parent.name == "snapshots" else root
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if (problem := _irregular(path)) is not None:
            raise UsageError(f"{path}: {problem}; remove it, or copy the folder again")
        outside = not Path(os.path.realpath(path)).is_relative_to(home)
        if outside and path.suffix not in WEIGHTS:
            raise UsageError(
                f"{path}: is a link to {os.path.realpath(path)}, outside of the folder; "
                f"where you trust it, copy the folder with `cp -rL {shlex.quote(str(folder))} COPY` and name the copy"
            )
    if not trust_remote_code:
        _check_imports(folder)


def _check_imports(folder: Path) -> None:
    """Raise UsageError for JSON files that have a library import a module, or fetch one."""
    for name, check in _CHECKS.items():
        if (folder / name).is_file() and (fault := check(read_object(folder / name))):
            raise UsageError(f"{folder / name}: {fault}; remove the key")


def refuse_pickles(folder: Path, own: str) -> None:
    """Raise where a folder of ours, which has the file `own`, holds pickles, or another's weights are read by running them."""
    from dstrain.models.stored import stored_tensors
    from dstrain.train import blocks

    if (folder / own).is_file():
        blocks.refuse_pickles(folder)
    if any(folder.glob("*.safetensors")):
        return
    try:
        stored_tensors(sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model.bin")]))
    except RecipeError as error:
        raise UsageError("\n".join(f"{fault.problem}; {fault.mend}" for fault in error.faults)) from error


def _irregular(path: Path) -> str | None:
    """Why a path is no file that can be read to its end; None where it is one, or a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot be read ({error.strerror})" if os.path.islink(path) else f"is not there ({error.strerror})"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is no regular file"


def _adapter_fault(config: Mapping[str, Any]) -> str:
    """What peft would import for an adapter (peft/tuners/lora/tp_layer.py, importlib.import_module(config.megatron_core))."""
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        return f"peft_type is {config['peft_type']!r}, and dstrain writes and reads LORA alone"
    return "megatron_config names a module to import" if config.get("megatron_config") else ""


def _config_fault(config: Mapping[str, Any]) -> str:
    """Attention, or another part, that comes as a kernel from the hub: ORG/NAME (transformers/integrations/hub_kernels.py)."""
    for key, value in config.items():
        if key.endswith("_implementation") and (names := [name for name in _texts(value) if "/" in name]):
            return f"{key} names code on the hub ({names[0]!r}), and {NO_WORD}"
        if isinstance(value, dict) and (fault := _config_fault(value)):
            return fault
    return ""


def _texts(value: Any) -> list[str]:
    """The texts in a value: itself, or the values of an object."""
    return [text for text in (value.values() if isinstance(value, dict) else [value]) if isinstance(text, str)]


_CHECKS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "adapter_config.json": _adapter_fault,
    "config.json": _config_fault,
}


def holds_module(folder: Path) -> bool:
    """Whether a folder is the export of a module that is none of transformers'."""
    there = [(folder / name).is_file() for name in ("dstrain_recipe.yaml", "config.json", "adapter_config.json")]
    return there == [True, False, False]


def check_head(task: Task, folder: Path) -> None:
    """Raise UsageError where the answers of an exported model would be those of a head that is drawn at random."""
    if isinstance(task, TextTask) and task.fit.drawn:
        name = task.fit.drawn[0]
        raise UsageError(
            f"{folder}: its files hold no {name}, which task {task.recipe.task} needs; give a trained model's folder"
        )
