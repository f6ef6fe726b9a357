"""Gradient checkpointing: the layers that recompute their activations, and where their inputs are kept."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def enable_gradient_checkpointing(model: PreTrainedModel, share: float = 1.0) -> None:
    """Recompute activations in the backward pass, if the model supports it: those of a share of the layers.

    Raises RecipeError for a share below 1 of a model that does not checkpoint layer by layer.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not getattr(model, "supports_gradient_checkpointing", False):
        return
    with warnings.catch_warnings():  # transformers 6 renames it activation_checkpointing_enable
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _disable_input_grads(model)
    if share == 1:
        return
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        problem = f"is {share:g}, but {type(model).__name__} does not recompute its layers one by one"
        raise RecipeError(Fault("model.gradient_checkpointing", problem, "write true or false"))
    for layer, is_chosen in zip(layers, choose_layers(len(layers), share), strict=True):
        layer.gradient_checkpointing = is_chosen


def _disable_input_grads(model: torch.nn.Module) -> None:
    """Let no output of an embedding require gradients on its own.

    transformers and peft make those of all embeddings do so, which only checkpoints with `use_reentrant` need. Every
    frozen layer below the first trained one would then be recomputed, and gradients sent through it to nothing
    (transformers/modeling_utils.py, `enable_input_require_grads`).
    """
    pretrained: Any = model
    if hasattr(model, "get_decoder"):
        pretrained.disable_input_require_grads()


def require_input_grads(model: torch.nn.Module) -> None:
    """Make the input of the decoder's first layer with a trained weight require gradients, and no other input.

    ZeRO-3 frees the gathered weights of a layer after its backward pass only if its input has a gradient. Call it after
    adapters are added and parameters frozen.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    _disable_input_grads(model)
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = [layer for layer in decoder.modules() if isinstance(layer, GradientCheckpointingLayer)] if decoder else []
    if not any(layer.gradient_checkpointing for layer in layers):
        return
    trained = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
    if trained[0]:
        decoder.enable_input_require_grads()
    elif any(trained):  # outside of the first trained layer, whose input is recomputed from
        layers[trained.index(True) - 1].register_forward_hook(_require_grad)


def _require_grad(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if layer.training and hidden.is_leaf:
        hidden.requires_grad_()


def choose_layers(count: int, share: float) -> list[bool]:
    """Return which of `count` layers recompute their activations: a share of them, at even distances, at least one."""
    number = max(1, round(count * share)) if share else 0
    return [(index + 1) * number // count > index * number // count for index in range(count)]


def offload_activation_checkpoints(model: PreTrainedModel | torch.nn.Module, pin_memory: bool) -> int:
    """Keep the input of each checkpointed layer in host memory. Return the number of such layers.

    torch's checkpoint saves its inputs before its own hooks are set, so hooks around it get the inputs and nothing
    else (torch/utils/checkpoint.py, _NoopSaveInputs). Call it after `enable_gradient_checkpointing`. `pin_memory`: use
    page-locked memory, which is copied in parallel to computation. Raises RecipeError where no layer is checkpointed.
    """
    import torch

    def offload_inputs(checkpoint_func: Any) -> Any:
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
                return checkpoint_func(*args, **kwargs)

        return checkpoint

    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [layer for layer in layers if hasattr(layer, "_gradient_checkpointing_func")]
    if not layers:
        problem = "the model checkpoints no layer, so there are no inputs to keep in host memory"
        raise RecipeError(Fault("activation_checkpointing.cpu_checkpointing", problem, "remove it from the preset"))
    for layer in layers:
        layer._gradient_checkpointing_func = offload_inputs(layer._gradient_checkpointing_func)
    return len(layers)
