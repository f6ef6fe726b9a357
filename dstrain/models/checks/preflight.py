"""What can be known wrong with a model's folder from its small files alone: no torch, no transformers, nothing of the weights."""

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
from dstrain.models.folder.hub_code import check_hub_code
from dstrain.models.folder.location import is_local_path
from dstrain.models.folder.model_types import is_bidirectional, max_learned_positions
from dstrain.models.folder.tokenizer_files import find_tokenizer_files, find_tokenizer_folder
from dstrain.models.weights.check_files import check_weight_files

GENERATION_TASKS = ("sft", "dpo", "kto", "vlm")
"""Packaged tasks whose model writes text from left to right."""
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
"""A config.json without any of them is not of a model that sees."""


def check_model(config: RunConfig) -> list[Fault]:
    """Faults of the model that a recipe names, found in config.json and the tokenizer's files; hub ids are not looked at.

    For tasks on text. What it passes may still be refused when transformers reads the folder.
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
    """Faults of model.path."""
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
    """Files that are not there or not whole, by their beginnings."""
    try:
        check_weight_files(model, open_pickles=False)
    except RecipeError as error:
        return list(error.faults)
    return []


def _read_config(name: str, key: str) -> dict[str, Any] | list[Fault] | None:
    """The config.json of a local folder; faults where it cannot be read; None for a hub id."""
    folder = Path(name).expanduser()
    if not os.path.isdir(folder):
        if not is_local_path(name) and not os.path.exists(folder):
            return None
        problem = "is a file, not a folder" if os.path.exists(folder) else "is no folder"
        return [Fault(key, f"'{name}' {problem}", f"give an existing folder or a hub id (we are in {Path.cwd()})")]
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
        return [Fault(key, f"{file} is a pointer of Git LFS and not the file", "run `git lfs pull` in its repository")]
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        return [Fault(key, f"{file} is not valid JSON ({error})", "correct it, or download it again")]
    if not isinstance(values, dict):
        return [Fault(key, f"{file} holds no JSON object", "correct it, or download it again")]
    return values


def _missing_config_fault(folder: Path, name: str, key: str) -> Fault:
    """A folder without config.json, by what lies there instead."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return Fault(key, f"'{name}' cannot be read (permission denied)", "correct its permissions")
    if (folder / ADAPTER_CONFIG).is_file():
        return Fault(
            key, f"'{name}' is an adapter, not a whole model", "merge it first (dstrain export RUN --merge-lora)"
        )
    if (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir():
        mend = f"export it first: dstrain export {name} --to DIR, then name DIR"
        return Fault(key, f"'{name}' is a run folder, not an exported model", mend)
    if next(folder.glob("*.gguf"), None):
        return Fault(key, f"'{name}' holds GGUF files, which are not trained", "give the folder of the original model")
    return Fault(key, f"'{name}' holds no config.json", "give a folder that transformers can load")


def _check_config(config: RunConfig, values: Mapping[str, Any], key: str) -> list[Fault]:
    """Faults in a config.json, or in model.config."""
    kind, model = values.get("model_type"), config.model
    if not isinstance(kind, str) or not kind:
        problem = "has no model_type" if key == "model.config" else "has no model_type in its config.json"
        return (
            []
            if "auto_map" in values
            else [Fault(key, problem, "give a model of transformers, e.g. model_type: llama")]
        )
    if key == "model.path" and not ("auto_map" in values and model.trust_remote_code) and not _is_known(kind):
        return [_unknown_type_fault(kind, values)]
    length, limit = config.data.max_length, max_learned_positions(values)
    faults = []
    if limit is not None and limit < length:
        problem = f"is {length}, and the model has learned {limit} positions"
        faults.append(
            Fault("data.max_length", problem, f"write {limit} or less, or name a model with rotary positions")
        )
    if config.task in GENERATION_TASKS and is_bidirectional(kind, values.get("is_decoder")):
        faults.append(bidirectional_fault(key, kind))
    if config.task == "vlm" and not any(name in values for name in VISION_KEYS) and _is_text_only(kind):
        faults.append(text_only_fault(key, kind))
    return faults


def bidirectional_fault(key: str, model_type: str) -> Fault:
    """An encoder where a model that writes is needed."""
    where = "model.config.is_decoder: true" if key == "model.config" else '"is_decoder": true in its config.json'
    problem = f"a {model_type} model attends in both directions, so it would see the tokens that it learns to write"
    return Fault(key, problem, f"set {where}, or name a model that writes from left to right (Llama, Qwen, GPT-2 ...)")


def text_only_fault(key: str, model_type: str) -> Fault:
    """A model of text where one that sees is needed."""
    mend = "name one (LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL ...), or take task sft"
    return Fault(key, f"{model_type} is a text-only model, and task vlm needs a vision-language model", mend)


def _family_folder(model_type: str) -> Path | None:
    """Where transformers keeps a family's files, found without importing it; None where it has none of that name."""
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
    """Whether transformers has the family. Only for a name without a folder of its own transformers is imported, for 2 s."""
    if _family_folder(model_type) is not None:
        return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _unknown_type_fault(model_type: str, values: Mapping[str, Any]) -> Fault:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    problem = f"its config.json has model_type '{model_type}', which transformers {__version__} does not know"
    if "auto_map" in values:
        return Fault(
            "model.path", problem, "set model.trust_remote_code: true if you trust the Python that comes with it"
        )
    near = suggest_name(model_type, [*CONFIG_MAPPING_NAMES])
    return Fault("model.path", problem, near if near.startswith("did you mean") else "install a newer transformers")


def _is_text_only(model_type: str) -> bool:
    """True for a family that has no processor of images."""
    folder = _family_folder(model_type)
    return folder is not None and not [*folder.glob("processing_*.py"), *folder.glob("image_processing_*.py")]


def _check_tokenizer(model: ModelConfig) -> list[Fault]:
    """Faults of the tokenizer's files, where the recipe or the model names a local folder for them."""
    if isinstance(model.processor, str):
        return _check_tokenizer_files(model.processor, "model.processor")
    if model.tokenizer is not None:
        return _check_tokenizer_files(model.tokenizer, "model.tokenizer") if isinstance(model.tokenizer, str) else []
    return _check_tokenizer_files(find_tokenizer_folder(model.path) or "", "model.path")


def _check_tokenizer_files(name: str, key: str) -> list[Fault]:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []
    mend = "set model.tokenizer (of a model that sees images model.processor) to a folder or hub id that has one"
    there = find_tokenizer_files(folder)
    if not there:
        return [Fault(key, f"there is no tokenizer in '{name}'", mend)]
    for file in there:
        try:
            with file.open("rb") as opened:
                start = opened.read(len(LFS_POINTER))
        except OSError as error:
            return [Fault(key, f"{file} cannot be read ({error.strerror})", "correct its permissions")]
        if start == LFS_POINTER:
            return [
                Fault(key, f"{file} is a pointer of Git LFS and not the file", "run `git lfs pull` in its repository")
            ]
        if not start:
            return [Fault(key, f"{file} is empty", f"download it again, or {mend}")]
    return []
