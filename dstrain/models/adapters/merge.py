"""Adapters become part of the weights they lie on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrain.errors import Fault, RecipeError
from dstrain.models.params.zero3 import gathered, is_source_rank

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def merge_adapters(model: PeftModel) -> PreTrainedModel:
    """The whole model, each weight changed in place (peft's safe_merge would make each anew). Collective under ZeRO-3.

    Adapters on one of two modules that share a weight (tied embeddings) would change the other too: each gets its own.
    """
    tied, shards = _find_tied_parameters(model), any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if tied and shards:
        problem = "the adapter changes embeddings that the model ties, which cannot be taken apart under ZeRO-3"
        raise RecipeError(Fault("model.path", problem, "merge it first (dstrain export RUN --merge-lora --to DIR)"))
    for module, name, parameter in tied:
        module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
    if tied:
        config = model.get_base_model().config
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
    return _merge_sharded(model) if shards else model.merge_and_unload()


def _merge_sharded(model: Any) -> PreTrainedModel:
    """Layer by layer, each whole while it is changed, by the process whose values stay."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        base = layer.get_base_layer()
        with gathered(base.parameters(recurse=False), modify=True), torch.no_grad():
            if is_source_rank(base.weight):
                layer._move_adapter_to_device_of_base_layer("default")
                layer.merge()
    return model.unload()


def _find_tied_parameters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """(Module, name, weight) of what shares a weight that another module's adapters lie on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    adapted = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in adapted
    ]
    firsts = {id(parameter): module for module, _, parameter in reversed(held)}
    return [(module, name, parameter) for module, name, parameter in held if firsts[id(parameter)] is not module]
