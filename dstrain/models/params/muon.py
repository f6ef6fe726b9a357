"""Parameters that Muon optimizes, and the factor on their learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING

from dstrain.models.params.components import unwrap_peft
from dstrain.models.params.zero3 import full_shape

if TYPE_CHECKING:
    import torch

ADAMW_UPDATE_RMS = 0.2
"""Approximate root mean square of an AdamW update at rate 1: Liu et al. (arXiv 2502.16982), section 2.2."""


def muon_param_ids(model: torch.nn.Module) -> frozenset[int]:
    """Return the ids of the weights of linear layers inside the model's body.

    Left out are embeddings, heads, biases and norms (Keller Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024), and parameters outside linear layers: position tables, state matrices, stacked experts,
    convolutions. A head is anything that transformers puts around its base model. In a module that is not
    transformers', every linear layer counts.
    """
    import torch

    core = unwrap_peft(model)
    body = getattr(core, "base_model", core)
    output = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
    # a linear layer that shares its weight with an embedding (tied head) is an embedding
    excluded = {id(module.weight) for module in core.modules() if isinstance(module, torch.nn.Embedding)}
    excluded |= {id(getattr(output, "weight", None))}
    return frozenset(id(layer.weight) for layer in _linear_layers(body)) - excluded


def _linear_layers(body: torch.nn.Module) -> Iterator[torch.nn.Module]:
    import torch
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, with a transposed weight

    return (module for module in body.modules() if isinstance(module, torch.nn.Linear | Conv1D))


def muon_lr_factor(parameter: torch.nn.Parameter) -> float:
    """Return the factor on a matrix's learning rate with which one rate serves Muon and AdamW alike.

    An orthogonal update (r, c) has a root mean square of 1 / sqrt(max(r, c)). Muon's own factor, sqrt(max(1, r / c)),
    makes it 1 / sqrt(c); 0.2 sqrt(c) on top gives Liu et al. (arXiv 2502.16982), eq. 4: 0.2 sqrt(max(r, c)) in all.
    """
    return ADAMW_UPDATE_RMS * sqrt(full_shape(parameter)[-1])
