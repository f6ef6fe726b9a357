"""LoRA adapter folders as the base of a run: loading with peft, and merging into the base model."""

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
from dstrain.models.weights.files import open_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

STATE_DICT_PREFIX = "base_model.model."
"""Stands before every name in an adapter's file."""


def load_adapters(model: Any, folder: Path) -> Any:
    """The model with the adapters of an exported folder on it, as peft loads them. Raises RecipeError.

    peft is given known settings alone: others of adapter_config.json name modules that it would import.
    """
    from peft import LoraConfig, PeftModel

    values = read_json_object(folder / CONFIG_FILE, str(folder))
    if wrong := find_invalid_setting(values):
        raise RecipeError(Fault(str(folder / CONFIG_FILE), wrong, DOWNLOAD_FIX))
    if odd := find_unsupported_setting({**values, "bias": "none", "init_lora_weights": True}):
        raise RecipeError(
            Fault(str(folder), f"its {odd} is not supported here", "merge it with peft's merge_and_unload")
        )
    kept = {
        name: value
        for name, value in values.items()
        if name in {*LORA_SETTINGS, *METADATA_SETTINGS} and value is not None
    }
    return PeftModel.from_pretrained(model, str(folder), config=LoraConfig(**kept))


def check_adapter(model: torch.nn.Module, adapter: Adapter) -> None:
    """Raise RecipeError where `merge_adapter` would. A skeleton of the model will do, and is of no use afterwards."""
    _match_tensors(model, adapter)


def merge_adapter(model: Any, adapter: Adapter) -> PreTrainedModel:
    """The model with the adapter's changes added to its weights. Collective under ZeRO-3, where one layer is whole at a time."""
    from dstrain.models.adapters.merge import merge_adapters

    learns = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    wrapped, places = _match_tensors(model, adapter)
    stored = open_tensors([adapter.weights_file])
    for name, place in places.items():  # in one order on every rank
        assign(place, stored[name].read)
    merged = merge_adapters(wrapped)
    for parameter in merged.parameters():  # peft freezes what adapters lie on
        parameter.requires_grad_(learns.get(id(parameter), True))
    return merged


def _match_tensors(model: Any, adapter: Adapter) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with fresh adapters, and where each tensor of the file belongs. Raises RecipeError."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    stored = open_tensors([adapter.weights_file])
    named = dict(model.named_parameters())  # before peft gives them other names
    try:
        with warnings.catch_warnings():  # transformers 6 will call is_gradient_checkpointing by another name
            warnings.simplefilter("ignore")
            wrapped = get_peft_model(model, LoraConfig(**adapter.settings))
    except (ValueError, TypeError) as error:
        lost = "Target modules" in str(error)
        raise _mismatch_error(
            adapter, "the model has none of the modules that it changes" if lost else str(error)
        ) from error
    places = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    lacking = sorted(places.keys() - stored.keys())
    if lacking:
        raise _mismatch_error(adapter, f"it lacks {first_names(lacking)}")
    saved = {name: named.get(_model_key(name)) for name in stored if name not in places}
    if homeless := sorted(name for name, place in saved.items() if place is None):
        raise _mismatch_error(adapter, f"the model has no place for its {first_names([*map(_model_key, homeless)])}")
    places |= cast("dict[str, torch.Tensor]", saved)
    for name, place in places.items():
        if stored[name].shape != full_shape(place):
            raise _mismatch_error(
                adapter, f"its {_model_key(name)} is {stored[name].shape}, and {full_shape(place)} would fit"
            )
    return wrapped, dict(sorted(places.items()))


def _model_key(name: str) -> str:
    """A name in the file as the model has it: peft saves an embedding that it adapts, too."""
    return name.removeprefix(STATE_DICT_PREFIX).replace(".base_layer.", ".")


def _mismatch_error(adapter: Adapter, reason: str) -> RecipeError:
    problem = f"the adapter in {adapter.folder} does not fit the model that is to be trained: {reason}"
    return RecipeError(
        Fault("model.path", problem, "name the folder of a model, or an adapter of a model of this kind")
    )
