"""Saved base-model config of a checkpoint that holds all weights."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dstrain.config.schema import ModelConfig
from dstrain.errors import RecipeError
from dstrain.models.load import read_config


def save_base_config(model: ModelConfig, folder: Path) -> None:
    """Write config.json and generation_config.json of `model.path` into a checkpoint that holds all weights.

    With them the checkpoint can be read after `model.path` is gone. Nothing is written for adapters (their base is
    needed anyway), for models with code of their own, and where a custom task gives `model.path` another meaning.
    """
    from transformers import GenerationConfig

    if model.path is None or model.lora is not None or model.trust_remote_code:
        return
    with contextlib.suppress(RecipeError):
        read_config(model).save_pretrained(str(folder))
        with contextlib.suppress(OSError):  # no generation_config.json
            GenerationConfig.from_pretrained(str(Path(model.path).expanduser())).save_pretrained(str(folder))
