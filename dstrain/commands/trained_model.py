"""A trained model, from a run's checkpoint or from an exported folder: found without torch, then loaded."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.commands.checks.untrusted_folder import check_folder, enabled, holding_of, refuse_pickles
from dstrain.commands.checks.untrusted_recipe import check_head, folder_recipe, holds_module, in_place_of_base
from dstrain.errors import CheckpointError, UsageError
from dstrain.preset import Device, Preset, RunSettings, complete, read_preset
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import World
    from dstrain.train.state.manifest import CheckpointInfo


EXPORT_RECIPE = "dstrain_recipe.yaml"
"""Lies in an exported folder, so that `evaluate` knows task and options."""
ADAPTERS = "adapter_config.json"
PROCESSOR = "processor_config.json"
WHOLE = {"zero_optimization": {"stage": 0}}
"""The JSON of a model that is whole on every process."""
OF_A_BASE = ("config", "init", "lora", "tokenizer", "processor", "chat_template", "quantize")
"""What the recipe of an exported model says of the weights it began with."""
OF_A_MODULE = ["model.lora=null", "model.init=null", "model.freeze=[]"]  # what its recipe says of how it began
TAKEN_APART = (
    "has two values for weights that the model's config ties; name the model it began with: --set model.path=FOLDER"
)
MICRO = 8
"""Samples of a forward pass where the recipe does not say."""


@dataclass(frozen=True)
class Trained:
    """A model and the task it was trained for."""

    task: Task
    model: torch.nn.Module
    step: int | None
    """Step of the checkpoint; None for an exported folder."""
    checkpoint: Path | None = None
    """Where its weights come from; None for an exported folder."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which trained model a command is about, as its options say."""

    folder: Path
    step: str = "best"
    task: str | None = None
    sets: Sequence[str] = ()
    ds_config: str | None = None
    """How to hold the model; None: see `Found.ds_config`."""

    def words(self) -> list[str]:
        """The same for the command line of a worker."""
        words = [str(self.folder.resolve()), "--step", self.step]
        task = str(Path(self.task).resolve()) if self.task and Path(self.task).is_file() else self.task
        words += ["--task", task] if task else []
        words += ["--ds-config", self.ds_config] if self.ds_config else []
        return words + [word for value in self.sets for word in ("--set", value)]

    def find(self, *own: str) -> Found:
        """The model; `own` overrides keys of its recipe, and is overridden by --set. Raises UsageError."""
        return find_trained(self.folder, self.step, ["model.gradient_checkpointing=false", *own, *self.sets], self.task)


@dataclass(frozen=True)
class Found:
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
    def micro(self) -> int:
        """Samples of a forward pass."""
        return self.task.recipe.batch.micro or MICRO

    def check(self) -> None:
        """Raise for an exported folder that cannot be loaded. A run needs nothing of what it began with."""
        if self.checkpoint is None:
            refuse_pickles(self.folder, EXPORT_RECIPE)
            self.task.check()
            check_head(self.task, self.folder)

    def ds_config(self, wanted: str | None, processes: int, device: Device) -> dict[str, Any]:
        """The DeepSpeed JSON to hold the model with, in shards or whole on every process.

        `wanted` names it; else several processes hold a run's model as it was trained. Raises PresetError.
        """
        from dstrain.train.engine.inference import apart

        preset = self._preset(wanted, processes)
        if preset is None or preset.stage != 3:
            return WHOLE
        dtype = self.task.recipe.model.dtype
        settings = RunSettings(
            precision="bf16" if dtype == "bfloat16" else "fp16" if dtype == "float16" else "fp32",
            micro=self.micro,
            accumulate=1,
            world_size=processes,
            clip=0.0,
            device_kind=device.kind,
            nvme_path=str(self.folder / "nvme"),
        )
        return apart(complete(preset, settings=settings))

    def _preset(self, wanted: str | None, processes: int) -> Preset | None:
        if wanted is not None:
            return read_preset(wanted)
        if self.checkpoint is None or processes == 1:
            return None
        return holding_of(self.folder)


def load_trained(folder: Path, step: str, sets: Sequence[str] = (), task: str | None = None) -> Trained:
    """The model in a run folder (at `step`) or an exported folder, whole on this process, in evaluation mode.

    It has the precision it was trained in. Raises UsageError where the folder is neither.
    """
    from dstrain.distributed.world import SoloWorld

    quieten()
    found = find_trained(folder, step, sets, task)
    found.check()
    model = load_found(found, WHOLE, SoloWorld()).eval()
    return Trained(found.task, model, found.step, found.checkpoint.path if found.checkpoint else None)


def quieten() -> None:
    """No progress bars, and no word of libraries on what they will change one day."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found none


def find_trained(folder: Path, step: str, sets: Sequence[str] = (), task: str | None = None) -> Found:
    """The model in a run folder (at `step`) or an exported folder, without reading its weights. Raises UsageError."""
    if (folder / "recipe.yaml").is_file():
        return _in_run(folder, step, sets, task)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTERS)) and not holds_module(folder):
        raise UsageError(f"{folder}: is neither a run folder (recipe.yaml) nor an exported model (config.json)")
    return Found(folder, _task_of_export(folder, sets, task))


def _task_of_export(folder: Path, sets: Sequence[str], task: str | None) -> Task:
    written, here = folder / EXPORT_RECIPE, json.dumps(str(folder.resolve()))
    if task is None and not written.is_file():
        raise UsageError(f"{folder}: is an exported model; say with --task what it was trained for, e.g. --task rm")
    if holds_module(folder):
        own = OF_A_MODULE
    elif not (folder / ADAPTERS).is_file():
        own = [f"model.path={here}", *(f"model.{key}=null" for key in OF_A_BASE), "model.freeze=[]"]
    elif written.is_file():
        own = _kept(folder)
    else:
        raise UsageError(f"{folder}: holds adapters and no {EXPORT_RECIPE} that says on what; export the run again")
    recipe = folder_recipe(written if written.is_file() else None, own, sets, task)
    check_folder(folder, recipe.model.trust_remote_code)
    return make_task(recipe)


def _kept(folder: Path) -> list[str]:
    """The tokenizer in a folder with its chat template, or the processor that has both, as --set takes them."""
    here = json.dumps(str(folder.resolve()))
    if (folder / PROCESSOR).is_file():
        return [f"model.processor={here}", "model.tokenizer=null", "model.chat_template=null"]
    return [f"model.tokenizer={here}", "model.chat_template=null"]


def _in_run(folder: Path, step: str, sets: Sequence[str], task: str | None) -> Found:
    from dstrain.train.checkpoint.select import find_checkpoint

    info = find_checkpoint(folder, step)
    own = []
    if (folder / "tokenizer").is_dir():
        check_folder(folder / "tokenizer", run=folder)
        own += _kept(folder / "tokenizer")
    if enabled(folder, "bf16"):
        own.append("model.dtype=bfloat16")
    own += in_place_of_base(folder, sets)
    made = make_task(folder_recipe(folder / "recipe.yaml", own, sets, task))
    model = made.recipe.model
    if isinstance(made, TextTask) and model.path is None and not isinstance(model.tokenizer or model.processor, str):
        # One would be trained on data.train, and be another one wherever that has changed.
        problem = "is not there, and only that tokenizer fits the weights"
        raise UsageError(f"{folder / 'tokenizer'}: {problem}; copy the whole run, or add --set model.tokenizer=FOLDER")
    return Found(folder, made, info)


def load_found(found: Found, ds_config: Mapping[str, Any], world: World) -> torch.nn.Module:
    """The task's model with its trained weights, in shards where the JSON says stage 3. Collective."""
    from dstrain.models.weights.meta_init import all_values_follow
    from dstrain.models.zero3 import sharded, sharded_construction
    from dstrain.train.build_model import build, build_bare
    from dstrain.train.state.weights import restore

    task, info = found.task, found.checkpoint
    adapted = info is not None and task.recipe.model.lora is not None
    if info is not None and adapted:
        _check_base(task, info, world, sharded(ds_config) and task.recipe.model.dtype in ("bfloat16", "float16"))
    with sharded_construction(ds_config):
        if info is None and ((found.folder / ADAPTERS).is_file() or holds_module(found.folder)):
            return task.reload(found.folder)
        if info is None:
            return task.build_model()
        if adapted:
            model = build(task)
        else:
            empty = _build_empty(task, info.path) if _may_be_empty(found, ds_config) else None
            with all_values_follow() as drawn:
                model = empty or build_bare(task)
            if drawn and _shared(model, info.path):
                raise CheckpointError(f"{info.path}: {TAKEN_APART}")
    restore(model, info.path, world, adapted)
    return model


def _may_be_empty(found: Found, ds_config: Mapping[str, Any]) -> bool:
    """Whether the model can be built without values: all of them lie in the checkpoint, and none would be read before."""
    from dstrain.models.zero3 import sharded

    task, model = found.task, found.task.recipe.model
    own = isinstance(task, TextTask) and all(
        getattr(type(task), name) is getattr(TextTask, name) for name in ("build_model", "load")
    )
    with_code = model.path is not None and model.trust_remote_code  # which may do as it likes where it is loaded
    return own and model.lora is None and not with_code and not sharded(ds_config)


def _build_empty(task: Task, checkpoint: Path) -> torch.nn.Module | None:
    """A model of one copy's size, with whatever lies in memory as its weights; no weights of its base are read.

    None where it would be another model than the one that is loaded: the checkpoint has two values for what is tied in it
    (transformers takes a tie apart where it reads two different tensors), the family loads some weights in 32 bits, or the
    base is quantized.
    """
    from dstrain.models.weights.meta_init import give_room, no_values
    from dstrain.train.build_model import build_bare

    with no_values():
        model = build_bare(task)
    kept = any(getattr(model, f"_keep_in_fp32_modules{which}", None) for which in ("", "_strict"))
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if _shared(model, checkpoint) or (kept and task.recipe.model.dtype) or quantized:
        return None
    give_room(model)
    return model


def _shared(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Whether the checkpoint has values of their own for two names that are one tensor in the model."""
    from dstrain.train.state.files import StoredState

    tensors = model.state_dict(keep_vars=True)
    stored = [id(tensors[name]) for name in StoredState(checkpoint).shapes if name in tensors]
    return len(stored) != len({*stored})


def hash_weights(task: Task, adapted: bool) -> None:
    """Hash into the cache what is compared by its hash later: a remembered reference, and the base of `adapted` weights."""
    from dstrain.models.weights.fingerprint import fingerprint

    wanted = [task.reference_model] if task.reference == "cached" else []
    for model in [*wanted, *([task.recipe.model] if adapted and task.recipe.model.lora else [])]:
        fingerprint(model, task.recipe.seed)


def _check_base(task: Task, info: CheckpointInfo, world: World, coarse: bool) -> None:
    """Raise CheckpointError where the adapters learnt on other weights than the recipe names now. Collective."""
    from dstrain.models.weights.fingerprint import OTHER_BASE, fingerprint

    base = world.broadcast(fingerprint(task.recipe.model, task.recipe.seed, coarse) if world.rank == 0 else None)
    if info.record().get("base") != base:
        raise CheckpointError(f"{info.path}: {OTHER_BASE}")
