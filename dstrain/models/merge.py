"""Adapters become part of the weights they lie on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def merge_adapters(model: PeftModel) -> PreTrainedModel:
    """The whole model, each weight changed in place (peft's safe_merge would make each anew).

    Adapters on one of two modules that share a weight (tied embeddings) would change the other too: each gets its own.
    """
    if _untie(model):
        config = model.get_base_model().config
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
    return model.merge_and_unload()


def _untie(model: torch.nn.Module) -> bool:
    """Give modules a weight of their own where another's adapters lie on it; returns whether there were any."""
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
    again = [(module, name, parameter) for module, name, parameter in held if firsts[id(parameter)] is not module]
    for module, name, parameter in again:
        module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
    return bool(again)
