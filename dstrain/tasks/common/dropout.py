"""Dropout switched off in a whole model."""

from __future__ import annotations

import copy
from typing import Any

import torch


def disable_dropout_in_model(model: torch.nn.Module) -> None:
    """Set every chance of dropping something (units, paths, whole layers) to 0; the model's own config keeps what it says.

    Parts that read a chance from their config as they run (Falcon, Hubert) get a copy of it. The noise that routers of
    experts add (jitter) is no dropout and stays.
    """
    from transformers import PretrainedConfig

    copies: dict[int, Any] = {}  # deepcopy's memo: parts that shared a config share its copy
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in name or name == "config"):  # Idefics keeps a dropout as `config`
                setattr(module, name, 0.0)
            elif isinstance(value, PretrainedConfig) and module is not model:
                setattr(module, name, _zero_config_dropout(copy.deepcopy(value, copies)))


def _zero_config_dropout(config: Any) -> Any:
    """The same config, its chances 0; those inside it too."""
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_diff_dict"):  # a config too
            _zero_config_dropout(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config
