"""Parameter groups of the optimizer: learning rate, weight decay and Muon, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from dstrain.config.schema import GroupConfig, OptimConfig, RunConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.params.components import components_by_name, unwrap_peft
from dstrain.models.params.freeze import check_patterns, freeze, is_selected
from dstrain.models.params.zero3 import full_shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a learning rate and a weight decay."""

    params: list[torch.nn.Parameter]
    lr_scale: float
    """Factor on the run's learning rate."""
    weight_decay: float
    use_muon: bool = False
    """True for matrices that Muon updates; its other groups are updated by AdamW."""


def check_freeze_and_groups(model: torch.nn.Module, recipe: RunConfig) -> None:
    """Raise RecipeError where model.freeze or optim.groups do not fit the model, which may be on the meta device."""
    freeze(model, recipe.model.freeze)
    build_param_groups(model, recipe.optim)


def build_param_groups(model: torch.nn.Module, optim: OptimConfig) -> list[ParamGroup]:
    """Group the trainable parameters by learning rate and weight decay; the first matching recipe group counts.

    Biases and norms (one dimension) get no weight decay. With Muon, the hidden matrices form groups of their own.
    Raises RecipeError for a pattern that matches nothing, and where Muon finds no trainable hidden matrix.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    components = components_by_name(model, trainable_only=True)
    check_patterns(components, optim.groups, "optim.groups")
    matrices = muon_param_ids(model) if optim.name == "muon" else frozenset()
    groups: dict[tuple[float, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trainable:
        group, lr = find_group_and_lr(name, components[name], optim)
        decay = optim.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        # As a factor, so that one schedule sets the rates of all groups.
        scale = 1.0 if lr is None else lr / optim.peak_lr if optim.peak_lr else 0.0
        use_muon = id(parameter) in matrices and (group is None or group.muon)
        if len(full_shape(parameter)) < 2:  # not .shape: ZeRO-3 flattens the parameter
            decay = 0.0
        elif use_muon:
            factor = muon_lr_factor(parameter)
            scale, decay = scale * factor, decay / factor  # a step decays by rate times decay, as for AdamW
        groups.setdefault((scale, decay, use_muon), []).append(parameter)
    if optim.name == "muon" and not any(use_muon for _, _, use_muon in groups):
        problem = "muon finds no trainable hidden matrix, so it would be the same as adamw"
        raise RecipeError(Fault("optim.name", problem, "write adamw, or freeze less"))
    return [ParamGroup(params, *key) for key, params in groups.items()]


def find_group_and_lr(name: str, component: str | None, optim: OptimConfig) -> tuple[GroupConfig | None, float | None]:
    """Return a parameter's recipe group and its peak learning rate; None means the run's rate, known later."""
    group = next((group for pattern, group in optim.groups.items() if is_selected(name, component, pattern)), None)
    return group, optim.lr if group is None or group.lr is None else group.lr


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
