"""Disabling of every dropout in a model."""

from __future__ import annotations

import copy
from typing import Any

import torch


def disable_dropout_in_model(model: torch.nn.Module) -> None:
    """Set every dropout probability (of units, paths, whole layers) to 0; the model's own config stays unchanged.

    Modules that read a probability from their config in the forward pass (Falcon, Hubert) get a copy of the config.
    The jitter of expert routers is not dropout and stays.
    """
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}  # deepcopy's memo: modules that share a config share its copy
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in name or name == "config"):  # Idefics keeps a dropout as `config`
                setattr(module, name, 0.0)
            elif isinstance(value, PretrainedConfig) and module is not model:
                setattr(module, name, _zero_config_dropout(copy.deepcopy(value, copies)))


def _zero_config_dropout(config: Any) -> Any:
    """Set the dropout probabilities of a config, and of the configs inside it, to 0. Returns it."""
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_diff_dict"):  # a nested config
            _zero_config_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config
