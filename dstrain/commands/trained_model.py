"""Trained models: lookup in a run or exported folder without torch, then loading."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.cache import file_digest, hash_key
from dstrain.commands.untrusted import (
    check_folder,
    check_head,
    check_no_pickles,
    is_module_export,
    is_precision_enabled,
    load_folder_recipe,
    read_forward_preset,
    saved_config_overrides,
)
from dstrain.config.resolve import DEFAULT_MICRO_BATCH_SIZE
from dstrain.data.sources.hub import parse_hub_split
from dstrain.ds_config import Device, RunSettings, complete_preset
from dstrain.errors import CheckpointError, Fault, UsageError
from dstrain.files import check_path_encoding, find_path, find_pattern
from dstrain.preset import read_preset
from dstrain.process_setup import log_if_slow
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.task import EXPORT_RECIPE

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import World
    from dstrain.training.state.manifest import CheckpointInfo


ADAPTER_CONFIG = "adapter_config.json"
PROCESSOR_CONFIG = "processor_config.json"
REPLICATED_DS_CONFIG = {"zero_optimization": {"stage": 0}}
"""DeepSpeed JSON of a model that is replicated on every process."""
BASE_MODEL_KEYS = ("revision", "config", "init", "lora", "tokenizer", "processor", "chat_template", "quantize")
"""Keys of an exported model's recipe that describe its starting weights, not the exported ones."""
NO_KWARGS = "model.chat_template_kwargs={}"
"""The saved template has them."""
MODULE_OVERRIDES = ["model.lora=null", "model.init=null", "model.freeze=[]"]
"""The same for the export of a module that is not a transformers model."""
TIE_CONFLICT_ERROR = "has two values for weights that the config ties; name its base model: --set model.path=FOLDER"


@dataclass(frozen=True)
class LoadedModel:
    """Model with its weights, and the task it was trained for."""

    task: Task
    model: torch.nn.Module
    step: int | None
    """Step of the checkpoint; None for an exported folder."""
    checkpoint: Path | None = None
    """Folder of its weights; None for an exported folder."""


@dataclass(frozen=True, kw_only=True)
class ModelSelector:
    """Options that select a trained model."""

    folder: Path
    step: str = "best"
    task: str | None = None
    overrides: Sequence[str] = ()
    ds_config: str | None = None
    """Preset or JSON for holding the model; None: see `SavedModel.build_ds_config`."""

    def to_argv(self) -> list[str]:
        """Return the same selection as arguments of a worker."""
        words = [str(self.folder.resolve()), "--step", self.step]
        task = str(Path(self.task).resolve()) if self.task and Path(self.task).is_file() else self.task
        words += ["--task", task] if task else []
        words += ["--ds-config", self.ds_config] if self.ds_config else []
        return words + [word for value in self.overrides for word in ("--set", value)]

    def find_model(self, data: str | None = None) -> SavedModel:
        """Return the model, with a file or Hub dataset in the place of its held-out data. Raises UsageError."""
        held_out = [] if data is None else [f"data.eval={json.dumps(make_eval_source(data))}", "data.eval_fraction=0"]
        overrides = ["model.gradient_checkpointing=false", *held_out, *self.overrides]
        return find_saved_model(self.folder, self.step, overrides, self.task)


def resolve_data_path(data: str) -> str:
    """Return an absolute path of a file, or of the pattern of several, for processes in another working directory."""
    return str(find_path(data, Path.cwd()) or find_pattern(data, Path.cwd()) or data)


def make_eval_source(data: str) -> Any:
    """Return the value for `data.eval`. Raises UsageError where `data` is neither a file nor a Hub dataset."""
    part = parse_hub_split(data)
    if found := find_path(data, Path.cwd()) or find_pattern(data, Path.cwd()):
        return str(found)
    if part is None:
        raise UsageError(f"--data {data}: there is no such file (working directory: {Path.cwd()}); check the path")
    return {"path": part.dataset, "split": part.split if ":" in data else None, "name": part.config_name}


@dataclass(frozen=True)
class SavedModel:
    """Trained model in a folder, not loaded yet."""

    folder: Path
    """Run folder or exported folder."""
    task: Task
    checkpoint: CheckpointInfo | None = None
    """None for an exported folder."""

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass on a process."""
        return self.task.recipe.batch.micro or DEFAULT_MICRO_BATCH_SIZE

    def weights_digest(self) -> str:
        """Return a hash of the weights in the folder: of a checkpoint's manifest, which has theirs, or of the files."""
        from dstrain.training.state.manifest import MANIFEST_FILE

        if self.checkpoint is not None:
            return file_digest(self.checkpoint.path / MANIFEST_FILE)
        files = sorted(self.folder.glob("*.safetensors"))
        return hash_key({path.name: file_digest(path) for path in files})

    def check_loadable(self) -> None:
        """Raise UsageError for an export that cannot be loaded, and for a run whose tokenizer has changed."""
        if self.checkpoint is None:
            check_no_pickles(self.folder, EXPORT_RECIPE)
            self.task.checks.run()
            self.task.checks.device()
            check_head(self.task, self.folder)
        else:
            self._check_inputs(self.checkpoint)

    def check_forward(self, task: Task, device: Device) -> None:
        """Raise RecipeError where this GPU needs kernels for batches of `task` that cannot be compiled here."""
        import torch

        from dstrain.training.build_model import check_attention_compiler

        if device.kind == "cuda":
            capability = torch.cuda.get_device_capability()
            check_attention_compiler(task, self.task.recipe.model.dtype, capability, os.environ)

    def _check_inputs(self, checkpoint: CheckpointInfo) -> None:
        """Raise UsageError if the run folder's tokenizer, or the model's config, is not what the checkpoint records."""
        from dstrain.models.weights import config_fingerprint
        from dstrain.training.input_digests import iter_input_changes

        own, model = self.folder / "tokenizer", self.task.recipe.model
        recorded = checkpoint.run_info.get("inputs", {})
        # Another path than the run's is the user's word.
        if model.path and model.path == checkpoint.run_info.get("recipe", {}).get("model", {}).get("path"):
            digest = config_fingerprint(model.path, model.revision)
            for key, what in iter_input_changes(recorded, {"model.path": {"digest": digest}} if digest else {}):
                fix = f"restore its config.json, or name a copy of the old folder: --set {key}=FOLDER"
                raise UsageError(Fault(model.path, f"{what} (step {checkpoint.step})", fix))
        if self.task.model_source is None or str(own.resolve()) not in (model.tokenizer, model.processor):
            return
        if self.task.has_own_tokenizer or model.chat_template is not None or model.chat_template_kwargs:
            return
        digests = {"model.tokenizer": {"digest": self.task.model_source.tokenizer_digest}}
        for key, what in iter_input_changes(recorded, digests):
            fix = f"copy the folder from the run again, or name a tokenizer: --set {key}=FOLDER"
            raise UsageError(Fault(str(own), f"{what} (step {checkpoint.step})", fix))

    def build_ds_config(self, preset_name: str | None, world_size: int, device: Device) -> dict[str, Any]:
        """Return the DeepSpeed JSON for holding the model, sharded (ZeRO-3) or replicated. Raises PresetError.

        Without `preset_name`, several processes hold a run's model as it was trained.
        """
        from dstrain.training.engine.base import with_private_nvme_path

        if preset_name is not None:
            preset = read_preset(preset_name)
        elif self.checkpoint is not None and world_size > 1:
            preset = read_forward_preset(self.folder)
        else:
            return REPLICATED_DS_CONFIG
        if preset.stage != 3:
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


def load_trained_model(folder: Path, step: str, overrides: Sequence[str] = (), task: str | None = None) -> LoadedModel:
    """Load the model of a run folder (at `step`) or an exported folder on this process, in evaluation mode.

    It has the precision it was trained in. Raises UsageError if the folder is neither.
    """
    from dstrain.distributed.world import SingleProcessWorld

    quiet_libraries()
    saved = find_saved_model(folder, step, overrides, task)
    saved.check_loadable()
    model = load_saved_model(saved, REPLICATED_DS_CONFIG, SingleProcessWorld()).eval()
    return LoadedModel(saved.task, model, saved.step, saved.checkpoint.path if saved.checkpoint else None)


def quiet_libraries() -> None:
    """Switch off progress bars and the libraries' FutureWarnings."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU


def find_saved_model(folder: Path, step: str, overrides: Sequence[str] = (), task: str | None = None) -> SavedModel:
    """Find the model of a run folder (at `step`) or an exported folder; its weights are not read.

    Raises UsageError.
    """
    check_path_encoding(str(folder))
    if (folder / "recipe.yaml").is_file():
        return _find_in_run(folder, step, overrides, task)
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)) and not is_module_export(folder):
        raise UsageError(
            f"{folder}: is neither a run folder (recipe.yaml) nor an exported model (config.json); give one of them"
        )
    return SavedModel(folder, _make_export_task(folder, overrides, task))


def _make_export_task(folder: Path, overrides: Sequence[str], task: str | None) -> Task:
    recipe_file, here = folder / EXPORT_RECIPE, json.dumps(str(folder.resolve()))
    if task is None and not recipe_file.is_file():
        raise UsageError(f"{folder}: is an exported model without a recipe; name its task, e.g. --task rm")
    if is_module_export(folder):
        own = MODULE_OVERRIDES
    elif not (folder / ADAPTER_CONFIG).is_file():
        own = [f"model.path={here}", *(f"model.{key}=null" for key in BASE_MODEL_KEYS), "model.freeze=[]", NO_KWARGS]
    elif recipe_file.is_file():
        own = _tokenizer_overrides(folder)
    else:
        raise UsageError(
            f"{folder}: has adapters but no {EXPORT_RECIPE}, which names their base model; export the run again"
        )
    recipe = load_folder_recipe(recipe_file if recipe_file.is_file() else None, own, overrides, task)
    check_folder(folder, recipe.model.trust_remote_code)
    return make_task(recipe)


def _tokenizer_overrides(folder: Path) -> list[str]:
    """Return --set arguments for a folder's tokenizer and chat template, or for its processor."""
    here = json.dumps(str(folder.resolve()))
    if (folder / PROCESSOR_CONFIG).is_file():
        return [f"model.processor={here}", "model.tokenizer=null", "model.chat_template=null", NO_KWARGS]
    return [f"model.tokenizer={here}", "model.chat_template=null", NO_KWARGS]


def _find_in_run(run_dir: Path, step: str, overrides: Sequence[str], task: str | None) -> SavedModel:
    from dstrain.training.checkpoints import select_checkpoint

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
    _check_model_config(run_dir, info, model.config, overrides)
    is_saved = model.path is not None or isinstance(model.tokenizer or model.processor, str)
    if made.model_source is not None and made.model_source.reads_text and not is_saved:
        # A tokenizer trained on data.train again would differ if that has changed.
        problem = "does not exist, and only that tokenizer fits the weights"
        raise UsageError(f"{run_dir / 'tokenizer'}: {problem}; copy the whole run, or add --set model.tokenizer=FOLDER")
    return SavedModel(run_dir, made, info)


def _check_model_config(
    run_dir: Path, checkpoint: CheckpointInfo, config: Mapping[str, Any] | None, overrides: Sequence[str]
) -> None:
    """Raise UsageError if model.config of the run's recipe.yaml is not the one that the checkpoint records.

    Weights of the same shapes would be loaded into another model.
    """
    from dstrain.training.start import read_recorded_recipe

    named = {text.partition("=")[0].strip() for text in overrides}
    if config is None or any(name == "model" or f"{name}.".startswith("model.config.") for name in named):
        return
    recorded = read_recorded_recipe(checkpoint)
    if recorded.model.config != config:
        problem = f"is not what the run was trained with (step {checkpoint.step})"
        fix = "restore the old file, or name the config: --set model.config={...}"
        raise UsageError(Fault(f"{run_dir / 'recipe.yaml'} model.config", problem, fix))


def load_saved_model(saved: SavedModel, ds_config: Mapping[str, Any], world: World) -> torch.nn.Module:
    """Return the model with its trained weights, sharded if the JSON has stage 3. Collective."""
    from dstrain.models.meta_init import weights_loaded_later
    from dstrain.models.params import is_zero3, zero3_init
    from dstrain.training.build_model import build_model, build_model_without_init
    from dstrain.training.state.engine_state import load_weights

    task, info = saved.task, saved.checkpoint
    adapted = info is not None and task.recipe.model.lora is not None
    if info is not None and adapted:
        _check_base(task, info, world, is_zero3(ds_config) and task.recipe.model.dtype in ("bfloat16", "float16"))
    with log_if_slow("loading the model", world.rank == 0), zero3_init(ds_config):
        if info is None and ((saved.folder / ADAPTER_CONFIG).is_file() or is_module_export(saved.folder)):
            reloaded = task.export.reload(saved.folder)
            return task.enable_packing(reloaded)
        if info is None:
            return task.build_model()
        if adapted:
            model = build_model(task)
        else:
            empty = build_uninitialized(task, info.path) if _can_build_uninitialized(saved, ds_config) else None
            with weights_loaded_later() as drawn:
                model = empty or build_model_without_init(task)
            if drawn and has_tie_conflict(model, info.path):
                raise CheckpointError(f"{info.path}: {TIE_CONFLICT_ERROR}")
    load_weights(model, info.path, world, adapted)
    return model


def _can_build_uninitialized(saved: SavedModel, ds_config: Mapping[str, Any]) -> bool:
    """Return True if the model can be built without values: the checkpoint has all, and none is read before."""
    from dstrain.models.params import is_zero3

    task, model = saved.task, saved.task.recipe.model
    with_code = model.path is not None and model.trust_remote_code  # that code may need real weights
    return not task.loads_own_model and model.lora is None and not with_code and not is_zero3(ds_config)


def hash_weights(task: Task, include_base: bool) -> None:
    """Cache the hashes that are compared later: of models whose outputs are precomputed, and of the base of adapters."""
    from dstrain.models.weights import weights_fingerprint

    inputs = task.loss_inputs
    wanted = [inputs.reference.config] if inputs.reference.kind == "cached" else []
    wanted += [scorer.config for scorer in inputs.scorers if scorer.is_cached]
    for model in [*wanted, *([task.recipe.model] if include_base and task.recipe.model.lora else [])]:
        weights_fingerprint(model, task.recipe.seed)


def _check_base(task: Task, info: CheckpointInfo, world: World, coarse: bool) -> None:
    """Raise CheckpointError if the adapters were trained on another base. Collective."""
    from dstrain.models.weights import BASE_CHANGED_MESSAGE, weights_fingerprint

    base = weights_fingerprint(task.recipe.model, task.recipe.seed, coarse) if world.rank == 0 else None
    base = world.broadcast(base)
    if info.run_info.get("base") != base:
        raise CheckpointError(f"{info.path}: {BASE_CHANGED_MESSAGE}")


def build_uninitialized(task: Task, checkpoint: Path) -> torch.nn.Module | None:
    """Build the model with uninitialized weights, so that memory holds one copy; None if it would differ.

    It differs from the model built from its base if the checkpoint has two values for tied weights
    (transformers unties weights when it reads two different tensors), if the family loads some
    weights in fp32, or if the base is quantized.
    """
    from dstrain.models.meta_init import materialize, meta_parameters
    from dstrain.training.build_model import build_model_without_init

    with meta_parameters():
        model = build_model_without_init(task)
    keeps_fp32 = any(getattr(model, f"_keep_in_fp32_modules{which}", None) for which in ("", "_strict"))
    quantized = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if has_tie_conflict(model, checkpoint) or (keeps_fp32 and task.recipe.model.dtype) or quantized:
        return None
    # Uninitialized: every value is read from the checkpoint.
    materialize(model)
    return model


def has_tie_conflict(model: torch.nn.Module, checkpoint: Path) -> bool:
    """Return True if the checkpoint has two values for names that are one tensor in the model."""
    from dstrain.training.state.files import CheckpointReader

    tensors = model.state_dict(keep_vars=True)
    # Tied names are one tensor in the model, so two stored values have one id.
    stored = [id(tensors[name]) for name in CheckpointReader(checkpoint).shapes if name in tensors]
    return len(stored) != len({*stored})
