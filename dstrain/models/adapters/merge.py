"""Merging of LoRA adapters into base weights, also under ZeRO-3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError
from dstrain.models.params.zero3 import gathered, is_source_rank

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel


def merge_adapters(model: PeftModel) -> PreTrainedModel:
    """Merge the adapters into the weights in place and return the base model. Collective under ZeRO-3.

    In place, because peft's safe_merge copies each weight. Two modules that share an adapted weight (tied embeddings)
    are untied first, as the merge would change the other one too. Raises RecipeError for these under ZeRO-3.
    """
    import torch

    tied, shards = _find_tied_parameters(model), any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if tied and shards:
        problem = "the adapter changes tied embeddings, which cannot be untied under ZeRO-3"
        raise RecipeError(Fault("model.path", problem, "merge it first (dstrain export RUN --merge-lora --to DIR)"))
    for module, name, parameter in tied:
        # Untied: the merge would change the other module's weight too.
        module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
    if tied:
        config = model.get_base_model().config
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            # Or the next load would tie them again, and lose one of the two.
            part.tie_word_embeddings = False
    return _merge_sharded(model) if shards else model.merge_and_unload()


def _merge_sharded(model: Any) -> PreTrainedModel:
    """Merge layer by layer: each is gathered, and changed by the rank whose values are partitioned again."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        # Only this layer's own weights are complete at a time.
        base = layer.get_base_layer()
        with gathered(base.parameters(recurse=False), modify=True), torch.no_grad():
            if is_source_rank(base.weight):
                layer._move_adapter_to_device_of_base_layer("default")
                layer.merge()
    return model.unload()


def _find_tied_parameters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return (module, attribute, weight) of each module that shares an adapted weight with an earlier module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    adapted = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in adapted
    ]
    firsts = {id(parameter): module for module, _, parameter in reversed(owners)}
    return [(module, name, parameter) for module, name, parameter in owners if firsts[id(parameter)] is not module]
