"""Which parameters are hidden matrices: what Muon turns into orthogonal steps."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ADAMW_UPDATE_RMS = 0.2
"""Root mean square of a step of AdamW at rate 1, about: Liu et al. (arXiv 2502.16982), section 2.2."""


def full_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape of the whole parameter: ZeRO-3 flattens what it shards."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def muon_param_ids(model: torch.nn.Module) -> frozenset[int]:
    """The ids of the weights of linear layers inside the model's body.

    Embeddings, heads, biases and norms are none of them (Keller Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024), nor is a parameter that is no linear layer's: position tables, state matrices, stacked experts,
    convolutions. A head is what transformers puts around its base model; of a module that is not transformers', every
    linear layer counts.
    """
    import torch

    core = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside peft's
    body = getattr(core, "base_model", core)
    output = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
    outside = {id(module.weight) for module in core.modules() if isinstance(module, torch.nn.Embedding)}
    outside |= {id(getattr(output, "weight", None))}
    return frozenset(id(layer.weight) for layer in _linear_layers(body)) - outside


def _linear_layers(body: torch.nn.Module) -> Iterator[torch.nn.Module]:
    import torch
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight the other way round

    return (module for module in body.modules() if isinstance(module, torch.nn.Linear | Conv1D))


def muon_lr_factor(parameter: torch.nn.Parameter) -> float:
    """What a matrix's rate is multiplied by, so that one rate serves Muon and AdamW alike.

    An orthogonal step (r, c) has a root mean square of 1 / sqrt(max(r, c)), and Muon's own factor, sqrt(max(1, r / c)),
    makes it 1 / sqrt(c); 0.2 sqrt(c) on top is Liu et al. (arXiv 2502.16982), eq. 4: 0.2 sqrt(max(r, c)) in all.
    """
    return ADAMW_UPDATE_RMS * sqrt(full_shape(parameter)[-1])
