"""Early checks of a model folder from its small files, without torch or transformers."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import Fault, RecipeError, suggest_name
from dstrain.models.folder.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from dstrain.models.folder.adapter_config import read_adapter
from dstrain.models.folder.config_sizes import wrong_size_fault
from dstrain.models.folder.hub_code import check_hub_code
from dstrain.models.folder.location import is_local_path, missing_folder_fault
from dstrain.models.folder.model_types import (
    is_bidirectional,
    max_learned_positions,
    max_length_fault,
    quantized_fault,
)
from dstrain.models.folder.tokenizer_files import find_tokenizer_files, find_tokenizer_folder
from dstrain.models.weights.check_files import check_weight_files

VISION_TASKS = ("vlm", "docqa")
"""Packaged tasks that need a vision-language model."""
GENERATION_TASKS = ("sft", "dpo", "kto", *VISION_TASKS)
"""Packaged tasks whose model generates text."""
LFS_POINTER = b"version https://git-lfs.github.com"
VISION_KEYS = (
    "vision_config",
    "vq_config",
    "vision_tower",
    "visual",
    "img_processor",
    "image_token_id",
    "image_token_index",
    "auto_map",
)
"""Keys of which a vision-language model's config.json has at least one."""


def check_model(config: RunConfig) -> list[Fault]:
    """Return the faults of a recipe's model, found in config.json and the tokenizer's files; Hub ids are not checked.

    For text tasks. A model that passes may still be rejected when transformers loads it.
    """
    model, options = config.model, config.options
    if model.path is None:
        return [] if model.config is None else _check_config(config, model.config, "model.config")
    faults = _check_folder(config, model.path)
    if isinstance(reference := options.get("ref_model"), str):
        values = _read_config(reference, "options.ref_model")
        trusted = model.trust_remote_code
        faults += (
            values if isinstance(values, list) else check_hub_code(values, reference, "options.ref_model", trusted)
        )
    return faults


def _check_folder(config: RunConfig, name: str) -> list[Fault]:
    """Return the faults of model.path."""
    try:
        adapter = read_adapter(name)
    except RecipeError as error:
        return list(error.faults)
    base = name if adapter is None else adapter.base_model
    values = _read_config(base, "model.path")
    faults = values if isinstance(values, list) else []
    if isinstance(values, dict):
        faults = _check_config(config, values, "model.path")
        faults += check_hub_code(values, base, "model.path", config.model.trust_remote_code)
        faults += _check_tokenizer(config.model)
        faults += _check_weights(config.model)
    return faults


def _check_weights(model: ModelConfig) -> list[Fault]:
    """Return the faults of missing or damaged weight files, by their headers."""
    try:
        check_weight_files(model, open_pickles=False)
    except RecipeError as error:
        return list(error.faults)
    return []


def _read_config(name: str, key: str) -> dict[str, Any] | list[Fault] | None:
    """Return the config.json of a local folder; faults where it cannot be read; None for a Hub id."""
    folder = Path(name).expanduser()
    if not os.path.isdir(folder):
        if not is_local_path(name) and not os.path.exists(folder):
            return None
        return [missing_folder_fault(name, key)]
    file = folder / "config.json"
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return [_missing_config_fault(folder, name, key)]
    except OSError as error:
        return [
            Fault(key, f"{file} cannot be read ({error.strerror})", "correct its permissions, or give another folder")
        ]
    if data.startswith(LFS_POINTER):
        return [_lfs_pointer_fault(file, key)]
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        return [Fault(key, f"{file} is not valid JSON ({error})", "correct it, or download it again")]
    if not isinstance(values, dict):
        return [Fault(key, f"{file} holds no JSON object", "correct it, or download it again")]
    return values


def _lfs_pointer_fault(file: Path, key: str) -> Fault:
    return Fault(key, f"{file} is a Git LFS pointer, not the file itself", "run `git lfs pull` in its repository")


def _missing_config_fault(folder: Path, name: str, key: str) -> Fault:
    """Return the fault of a folder without config.json, by its other files."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return Fault(key, f"'{name}' cannot be read (permission denied)", "correct its permissions")
    if (folder / ADAPTER_CONFIG).is_file():
        problem = f"'{name}' is an adapter, not a complete model"
        return Fault(key, problem, "merge it first (dstrain export RUN --merge-lora)")
    if (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir():
        fix = f"export it first: dstrain export {name} --to DIR, then name DIR"
        return Fault(key, f"'{name}' is a run folder, not an exported model", fix)
    if next(folder.glob("*.gguf"), None):
        problem = f"'{name}' holds GGUF files, which cannot be trained"
        return Fault(key, problem, "give the folder of the original model")
    return Fault(key, f"'{name}' holds no config.json", "give a folder that transformers can load")


def _check_config(config: RunConfig, values: Mapping[str, Any], key: str) -> list[Fault]:
    """Return the faults in a config.json, or in model.config."""
    model_type, model = values.get("model_type"), config.model
    if not isinstance(model_type, str) or not model_type:
        if "auto_map" in values:  # custom code need not have a model type
            return []
        problem = "has no model_type" if key == "model.config" else "has no model_type in its config.json"
        return [Fault(key, problem, "give a model of transformers, e.g. model_type: llama")]
    if key == "model.path" and not ("auto_map" in values and model.trust_remote_code) and not _is_known(model_type):
        return [_unknown_type_fault(model_type, values)]
    if fault := quantized_fault(values, key) or wrong_size_fault(values, key):
        return [fault]
    max_length, limit = config.data.max_length, max_learned_positions(values)
    faults = []
    if limit is not None and limit < max_length:
        faults.append(max_length_fault(max_length, limit))
    if config.task in GENERATION_TASKS and is_bidirectional(model_type, values.get("is_decoder")):
        faults.append(bidirectional_fault(key, model_type))
    has_vision = any(name in values for name in VISION_KEYS)
    if config.task in VISION_TASKS and not has_vision and _is_text_only(model_type):
        faults.append(text_only_fault(key, model_type, f"task {config.task}"))
    return faults


def bidirectional_fault(key: str, model_type: str) -> Fault:
    """Return the fault of an encoder where a generative model is needed."""
    where = "model.config.is_decoder: true" if key == "model.config" else '"is_decoder": true in its config.json'
    problem = f"a {model_type} model attends in both directions, so it would see the tokens that it has to predict"
    return Fault(key, problem, f"set {where}, or use a causal language model (Llama, Qwen, GPT-2 …)")


def text_only_fault(key: str, model_type: str, needed_by: str) -> Fault:
    """Return the fault of a text-only model where a task or an option needs a vision-language model."""
    problem = f"{model_type} is a text-only model; {needed_by} needs a vision-language model"
    return Fault(key, problem, "name one (LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL …), or use task sft")


def _family_folder(model_type: str) -> Path | None:
    """Return transformers' folder of a model type, found without importing transformers; None where it has none."""
    spec = importlib.util.find_spec("transformers")
    if (
        spec is None
        or spec.origin is None
        or not model_type.isascii()
        or not model_type.replace("-", "_").isidentifier()
    ):
        return None
    folder = Path(spec.origin).parent / "models" / model_type.replace("-", "_")
    return folder if folder.is_dir() else None


def _is_known(model_type: str) -> bool:
    """Return True where transformers has the model type. Imports transformers (2 s) only for one without a folder."""
    if _family_folder(model_type) is not None:
        return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _unknown_type_fault(model_type: str, values: Mapping[str, Any]) -> Fault:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    problem = f"its config.json has model_type '{model_type}', which transformers {__version__} does not know"
    if "auto_map" in values:
        fix = "set model.trust_remote_code: true if you trust the Python code that comes with it"
        return Fault("model.path", problem, fix)
    near = suggest_name(model_type, [*CONFIG_MAPPING_NAMES])
    return Fault("model.path", problem, near if near.startswith("did you mean") else "install a newer transformers")


def _is_text_only(model_type: str) -> bool:
    """Return True for a model type without an image processor."""
    folder = _family_folder(model_type)
    return folder is not None and not [*folder.glob("processing_*.py"), *folder.glob("image_processing_*.py")]


def _check_tokenizer(model: ModelConfig) -> list[Fault]:
    """Return the faults of the tokenizer's files, if they are in a local folder."""
    if isinstance(model.processor, str):
        return _check_tokenizer_files(model.processor, "model.processor")
    if model.tokenizer is not None:
        return _check_tokenizer_files(model.tokenizer, "model.tokenizer") if isinstance(model.tokenizer, str) else []
    return _check_tokenizer_files(find_tokenizer_folder(model.path) or "", "model.path")


def _check_tokenizer_files(name: str, key: str) -> list[Fault]:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []
    fix = "set model.tokenizer (for a vision-language model, model.processor) to a folder or hub id that has one"
    files = find_tokenizer_files(folder)
    if not files:
        return [Fault(key, f"there is no tokenizer in '{name}'", fix)]
    for file in files:
        try:
            with file.open("rb") as opened:
                start = opened.read(len(LFS_POINTER))
        except OSError as error:
            return [Fault(key, f"{file} cannot be read ({error.strerror})", "correct its permissions")]
        if start == LFS_POINTER:
            return [_lfs_pointer_fault(file, key)]
        if not start:
            return [Fault(key, f"{file} is empty", f"download it again, or {fix}")]
    return []
