"""A trained model, from a run's checkpoint or from an exported folder: found without torch, then loaded."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.checks.untrusted_folder import (
    check_folder,
    check_no_pickles,
    is_precision_enabled,
    read_forward_preset,
)
from dstrain.commands.checks.untrusted_recipe import (
    check_head,
    is_module_export,
    load_folder_recipe,
    saved_config_overrides,
)
from dstrain.errors import CheckpointError, UsageError
from dstrain.preset import Device, Preset, RunSettings, complete_preset, read_preset
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import World
    from dstrain.train.state.manifest import CheckpointInfo


EXPORT_RECIPE = "dstrain_recipe.yaml"
"""Lies in an exported folder, so that `evaluate` knows task and options."""
ADAPTER_CONFIG = "adapter_config.json"
PROCESSOR_CONFIG = "processor_config.json"
REPLICATED_DS_CONFIG = {"zero_optimization": {"stage": 0}}
"""The JSON of a model that is whole on every process."""
BASE_MODEL_KEYS = ("config", "init", "lora", "tokenizer", "processor", "chat_template", "quantize")
"""What the recipe of an exported model says of the weights it began with."""
MODULE_OVERRIDES = ["model.lora=null", "model.init=null", "model.freeze=[]"]  # what its recipe says of how it began
TIE_CONFLICT_ERROR = (
    "has two values for weights that the model's config ties; name the model it began with: --set model.path=FOLDER"
)
DEFAULT_MICRO_BATCH_SIZE = 8
"""Samples of a forward pass where the recipe does not say."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and the task it was trained for."""

    task: Task
    model: torch.nn.Module
    step: int | None
    """Step of the checkpoint; None for an exported folder."""
    checkpoint: Path | None = None
    """Where its weights come from; None for an exported folder."""


@dataclass(frozen=True, kw_only=True)
class ModelSelector:
    """Which trained model a command is about, as its options say."""

    folder: Path
    step: str = "best"
    task: str | None = None
    overrides: Sequence[str] = ()
    ds_config: str | None = None
    """How to hold the model; None: see `Found.ds_config`."""

    def to_argv(self) -> list[str]:
        """The same for the command line of a worker."""
        words = [str(self.folder.resolve()), "--step", self.step]
        task = str(Path(self.task).resolve()) if self.task and Path(self.task).is_file() else self.task
        words += ["--task", task] if task else []
        words += ["--ds-config", self.ds_config] if self.ds_config else []
        return words + [word for value in self.overrides for word in ("--set", value)]

    def find_model(self, *base_overrides: str) -> SavedModel:
        """The model; `own` overrides keys of its recipe, and is overridden by --set. Raises UsageError."""
        return find_saved_model(
            self.folder, self.step, ["model.gradient_checkpointing=false", *base_overrides, *self.overrides], self.task
        )


@dataclass(frozen=True)
class SavedModel:
    """A trained model that is there."""

    folder: Path
    """A run folder, or an exported one."""
    task: Task
    checkpoint: CheckpointInfo | None = None
    """None for an exported folder."""

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def micro_batch_size(self) -> int:
        """Samples of a forward pass."""
        return self.task.recipe.batch.micro or DEFAULT_MICRO_BATCH_SIZE

    def check_loadable(self) -> None:
        """Raise for an exported folder that cannot be loaded. A run needs nothing of what it began with."""
        if self.checkpoint is None:
            check_no_pickles(self.folder, EXPORT_RECIPE)
            self.task.check()
            check_head(self.task, self.folder)

    def build_ds_config(self, preset_name: str | None, world_size: int, device: Device) -> dict[str, Any]:
        """The DeepSpeed JSON to hold the model with, in shards or whole on every process.

        `wanted` names it; else several processes hold a run's model as it was trained. Raises PresetError.
        """
        from dstrain.train.engine.inference import with_private_nvme_path

        preset = self._select_preset(preset_name, world_size)
        if preset is None or preset.stage != 3:
            return REPLICATED_DS_CONFIG
        dtype = self.task.recipe.model.dtype
        settings = RunSettings(
            precision="bf16" if dtype == "bfloat16" else "fp16" if dtype == "float16" else "fp32",
            micro=self.micro_batch_size,
            accumulate=1,
            world_size=world_size,
            clip=0.0,
            device_kind=device.kind,
            nvme_path=str(self.folder / "nvme"),
        )
        return with_private_nvme_path(complete_preset(preset, settings=settings))

    def _select_preset(self, preset_name: str | None, world_size: int) -> Preset | None:
        if preset_name is not None:
            return read_preset(preset_name)
        if self.checkpoint is None or world_size == 1:
            return None
        return read_forward_preset(self.folder)


def load_trained_model(folder: Path, step: str, overrides: Sequence[str] = (), task: str | None = None) -> LoadedModel:
    """The model in a run folder (at `step`) or an exported folder, whole on this process, in evaluation mode.

    It has the precision it was trained in. Raises UsageError where the folder is neither.
    """
    from dstrain.distributed.world import SingleProcessWorld

    quiet_libraries()
    found = find_saved_model(folder, step, overrides, task)
    found.check_loadable()
    model = load_saved_model(found, REPLICATED_DS_CONFIG, SingleProcessWorld()).eval()
    return LoadedModel(found.task, model, found.step, found.checkpoint.path if found.checkpoint else None)


def quiet_libraries() -> None:
    """No progress bars, and no word of libraries on what they will change one day."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found none


def find_saved_model(folder: Path, step: str, overrides: Sequence[str] = (), task: str | None = None) -> SavedModel:
    """The model in a run folder (at `step`) or an exported folder, without reading its weights. Raises UsageError."""
    if (folder / "recipe.yaml").is_file():
        return _find_in_run(folder, step, overrides, task)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)) and not is_module_export(folder):
        raise UsageError(f"{folder}: is neither a run folder (recipe.yaml) nor an exported model (config.json)")
    return SavedModel(folder, _make_export_task(folder, overrides, task))


def _make_export_task(folder: Path, overrides: Sequence[str], task: str | None) -> Task:
    written, here = folder / EXPORT_RECIPE, json.dumps(str(folder.resolve()))
    if task is None and not written.is_file():
        raise UsageError(f"{folder}: is an exported model; say with --task what it was trained for, e.g. --task rm")
    if is_module_export(folder):
        own = MODULE_OVERRIDES
    elif not (folder / ADAPTER_CONFIG).is_file():
        own = [f"model.path={here}", *(f"model.{key}=null" for key in BASE_MODEL_KEYS), "model.freeze=[]"]
    elif written.is_file():
        own = _tokenizer_overrides(folder)
    else:
        raise UsageError(f"{folder}: holds adapters and no {EXPORT_RECIPE} that says on what; export the run again")
    recipe = load_folder_recipe(written if written.is_file() else None, own, overrides, task)
    check_folder(folder, recipe.model.trust_remote_code)
    return make_task(recipe)


def _tokenizer_overrides(folder: Path) -> list[str]:
    """The tokenizer in a folder with its chat template, or the processor that has both, as --set takes them."""
    here = json.dumps(str(folder.resolve()))
    if (folder / PROCESSOR_CONFIG).is_file():
        return [f"model.processor={here}", "model.tokenizer=null", "model.chat_template=null"]
    return [f"model.tokenizer={here}", "model.chat_template=null"]


def _find_in_run(run_dir: Path, step: str, overrides: Sequence[str], task: str | None) -> SavedModel:
    from dstrain.train.checkpoint.select import select_checkpoint

    info = select_checkpoint(run_dir, step)
    own = []
    if (run_dir / "tokenizer").is_dir():
        check_folder(run_dir / "tokenizer", run_dir=run_dir)
        own += _tokenizer_overrides(run_dir / "tokenizer")
    if is_precision_enabled(run_dir, "bf16"):
        own.append("model.dtype=bfloat16")
    own += saved_config_overrides(run_dir, overrides)
    made = make_task(load_folder_recipe(run_dir / "recipe.yaml", own, overrides, task))
    model = made.recipe.model
    if isinstance(made, TextTask) and model.path is None and not isinstance(model.tokenizer or model.processor, str):
        # One would be trained on data.train, and be another one wherever that has changed.
        problem = "is not there, and only that tokenizer fits the weights"
        raise UsageError(f"{run_dir / 'tokenizer'}: {problem}; copy the whole run, or add --set model.tokenizer=FOLDER")
    return SavedModel(run_dir, made, info)


def load_saved_model(saved: SavedModel, ds_config: Mapping[str, Any], world: World) -> torch.nn.Module:
    """The task's model with its trained weights, in shards where the JSON says stage 3. Collective."""
    from dstrain.models.params.zero3 import is_zero3, zero3_init
    from dstrain.models.weights.meta_init import weights_loaded_later
    from dstrain.train.build_model import build_model, build_model_without_init
    from dstrain.train.state.weights import load_weights

    task, info = saved.task, saved.checkpoint
    adapted = info is not None and task.recipe.model.lora is not None
    if info is not None and adapted:
        _check_base(task, info, world, is_zero3(ds_config) and task.recipe.model.dtype in ("bfloat16", "float16"))
    with zero3_init(ds_config):
        if info is None and ((saved.folder / ADAPTER_CONFIG).is_file() or is_module_export(saved.folder)):
            return task.reload(saved.folder)
        if info is None:
            return task.build_model()
        if adapted:
            model = build_model(task)
        else:
            empty = _build_empty(task, info.path) if _can_build_empty(saved, ds_config) else None
            with weights_loaded_later() as drawn:
                model = empty or build_model_without_init(task)
            if drawn and _has_tie_conflict(model, info.path):
                raise CheckpointError(f"{info.path}: {TIE_CONFLICT_ERROR}")
    load_weights(model, info.path, world, adapted)
    return model


def _can_build_empty(saved: SavedModel, ds_config: Mapping[str, Any]) -> bool:
    """Whether the model can be built without values: all of them lie in the checkpoint, and none would be read before."""
    from dstrain.models.params.zero3 import is_zero3

    task, model = saved.task, saved.task.recipe.model
    own = isinstance(task, TextTask) and all(
        getattr(type(task), name) is getattr(TextTask, name) for name in ("build_model", "load")
    )
    with_code = model.path is not None and model.trust_remote_code  # which may do as it likes where it is loaded
    return own and model.lora is None and not with_code and not is_zero3(ds_config)


def _build_empty(task: Task, checkpoint: Path) -> torch.nn.Module | None:
    """A model of one copy's size, with whatever lies in memory as its weights; no weights of its base are read.

    None where it would be another model than the one that is loaded: the checkpoint has two values for what is tied in it
    (transformers takes a tie apart where it reads two different tensors), the family loads some weights in 32 bits, or the
    base is quantized.
    """
    from dstrain.models.weights.meta_init import materialize, meta_parameters
    from dstrain.train.build_model import build_model_without_init

    with meta_parameters():
        model = build_model_without_init(task)
    kept = any(getattr(model, f"_keep_in_fp32_modules{which}", None) for which in ("", "_strict"))
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if _has_tie_conflict(model, checkpoint) or (kept and task.recipe.model.dtype) or quantized:
        return None
    materialize(model)
    return model


def _has_tie_conflict(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Whether the checkpoint has values of their own for two names that are one tensor in the model."""
    from dstrain.train.state.files import CheckpointReader

    tensors = model.state_dict(keep_vars=True)
    stored = [id(tensors[name]) for name in CheckpointReader(checkpoint).shapes if name in tensors]
    return len(stored) != len({*stored})


def hash_weights(task: Task, include_base: bool) -> None:
    """Hash into the cache what is compared by its hash later: a remembered reference, and the base of `adapted` weights."""
    from dstrain.models.weights.fingerprint import weights_fingerprint

    wanted = [task.reference_config] if task.reference_kind == "cached" else []
    for model in [*wanted, *([task.recipe.model] if include_base and task.recipe.model.lora else [])]:
        weights_fingerprint(model, task.recipe.seed)


def _check_base(task: Task, info: CheckpointInfo, world: World, coarse: bool) -> None:
    """Raise CheckpointError where the adapters learnt on other weights than the recipe names now. Collective."""
    from dstrain.models.weights.fingerprint import BASE_CHANGED_MESSAGE, weights_fingerprint

    base = world.broadcast(
        weights_fingerprint(task.recipe.model, task.recipe.seed, coarse) if world.rank == 0 else None
    )
    if info.read_run_info().get("base") != base:
        raise CheckpointError(f"{info.path}: {BASE_CHANGED_MESSAGE}")
