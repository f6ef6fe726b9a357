"""What a run keeps of the model that it began with."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dstrain.config.schema import ModelConfig
from dstrain.errors import RecipeError
from dstrain.models.load import read_config


def save_base_config(model: ModelConfig, folder: Path) -> None:
    """Write what a model of `model.path` is built from, for a checkpoint that has all its weights. Not of adapters' base.

    Nothing where another's Python builds it, and where a task of its own means something else by `model.path`.
    """
    from transformers import GenerationConfig

    if model.path is None or model.lora is not None or model.trust_remote_code:
        return
    with contextlib.suppress(RecipeError):
        read_config(model).save_pretrained(str(folder))
        with contextlib.suppress(OSError):  # it has none
            GenerationConfig.from_pretrained(str(Path(model.path).expanduser())).save_pretrained(str(folder))
