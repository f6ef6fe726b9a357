"""LoRA adapter folders as the base of a run: loading with peft and merging."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dstrain.errors import Fault, RecipeError, first_names
from dstrain.models.folder.adapter_config import (
    CONFIG_FILE,
    DOWNLOAD_FIX,
    LORA_SETTINGS,
    METADATA_SETTINGS,
    Adapter,
    find_invalid_setting,
    find_unsupported_setting,
    read_json_object,
)
from dstrain.models.params.zero3 import assign, full_shape
from dstrain.models.quantization.library import preload_bitsandbytes
from dstrain.models.weights.files import open_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

STATE_DICT_PREFIX = "base_model.model."
"""Prefix of every key in an adapter's file."""


def load_adapters(model: Any, folder: Path) -> Any:
    """Load the adapters of an exported folder onto the model with peft. Raises RecipeError.

    peft gets only known settings: others in adapter_config.json may name modules that it would import.
    """
    preload_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel

    values = read_json_object(folder / CONFIG_FILE, str(folder))
    if problem := find_invalid_setting(values):
        raise RecipeError(Fault(str(folder / CONFIG_FILE), problem, DOWNLOAD_FIX))
    if setting := find_unsupported_setting({**values, "bias": "none", "init_lora_weights": True}):
        problem = f"its {setting} is not supported here"
        raise RecipeError(Fault(str(folder), problem, "merge it with peft's merge_and_unload"))
    settings = {
        name: value
        for name, value in values.items()
        if name in {*LORA_SETTINGS, *METADATA_SETTINGS} and value is not None
    }
    return PeftModel.from_pretrained(model, str(folder), config=PeftConfig(**settings))


def check_adapter(model: torch.nn.Module, adapter: Adapter) -> None:
    """Raise RecipeError where `merge_adapter` would. The model may be on the meta device; it is unusable afterwards."""
    _match_tensors(model, adapter)


def merge_adapter(model: Any, adapter: Adapter) -> PreTrainedModel:
    """Add the adapter's update to the model's weights. Collective under ZeRO-3, which gathers one layer at a time."""
    from dstrain.models.adapters.merge import merge_adapters

    requires_grad = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    wrapped, targets = _match_tensors(model, adapter)
    stored = open_tensors([adapter.weights_file])
    for name, target in targets.items():  # sorted: the same order on every rank, as assign is collective
        assign(target, stored[name].read)
    merged = merge_adapters(wrapped)
    for parameter in merged.parameters():  # peft has frozen the base model
        parameter.requires_grad_(requires_grad.get(id(parameter), True))
    return merged


def _match_tensors(model: Any, adapter: Adapter) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model with new adapters, and the target of each tensor in the file. Raises RecipeError."""
    preload_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, get_peft_model_state_dict

    stored = open_tensors([adapter.weights_file])
    named = dict(model.named_parameters())  # before peft renames them
    try:
        with warnings.catch_warnings():  # transformers 6 renames is_gradient_checkpointing
            warnings.simplefilter("ignore")
            wrapped = get_peft_model(model, PeftConfig(**_without_saved_modules(adapter)))
    except (ValueError, TypeError) as error:
        no_targets = "Target modules" in str(error)
        reason = "the model has none of the modules that it adapts" if no_targets else str(error)
        raise _mismatch_error(adapter, reason) from error
    targets = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    saved = {name: named.get(_model_key(name)) for name in stored if name not in targets}  # modules_to_save
    missing = sorted(targets.keys() - stored.keys())
    unexpected = sorted(_model_key(name) for name, target in saved.items() if target is None)
    if missing or unexpected:
        keys = f"missing keys: {first_names(missing)}; unexpected keys: {first_names(unexpected)}"
        raise _mismatch_error(adapter, keys)
    targets |= cast("dict[str, torch.Tensor]", saved)
    for name, target in targets.items():
        if stored[name].shape != full_shape(target):
            shapes = f"{_model_key(name)} is {stored[name].shape} in its file and {full_shape(target)} in the model"
            raise _mismatch_error(adapter, shapes)
    return wrapped, dict(sorted(targets.items()))


def _without_saved_modules(adapter: Adapter) -> dict[str, Any]:
    """Return the adapter's settings without targets that its file holds completely.

    For all-linear, peft lists a new head among the targets, but gives it no adapter where it is in `modules_to_save`.
    """
    settings, targets = dict(adapter.settings), adapter.settings.get("target_modules")
    if isinstance(targets, list):
        settings["target_modules"] = [name for name in targets if name not in adapter.modules_to_save]
    return settings


def _model_key(name: str) -> str:
    """Return the model's key for a key of the file; peft also saves the base layer of an adapted embedding."""
    return name.removeprefix(STATE_DICT_PREFIX).replace(".base_layer.", ".")


def _mismatch_error(adapter: Adapter, reason: str) -> RecipeError:
    problem = f"the adapter in {adapter.folder} does not fit the model to train: {reason}"
    fix = "name the folder of a model, or an adapter of a model of this architecture"
    return RecipeError(Fault("model.path", problem, fix))
