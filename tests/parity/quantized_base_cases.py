"""Worker functions of the tests of quantized bases."""

from __future__ import annotations

import gc
import os
from typing import Any
from unittest.mock import patch

from transformers import AutoModelForCausalLM

from dstrain.config.schema import ModelConfig
from dstrain.models.load import load_model, read_config
from dstrain.models.params import zero3_init
from tests.parity.cases import ds_config, weights, world
from tests.parity.memory_cases import NewStorages


def loaded(folder: str, kind: str) -> dict[str, Any]:
    """Return the weights of a quantized base, and the bytes that this rank holds while it loads and afterwards."""
    # transformers' threads would allocate outside of what this mode sees
    with patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
        settings = ModelConfig(path=folder, dtype="bfloat16")
        config = ds_config(kind, {"world_size": world().size, "precision": "bf16"})
        with NewStorages() as counted, zero3_init(config):
            model = load_model(AutoModelForCausalLM, settings, read_config(settings), 0)
    gc.collect()
    mine = [getattr(one, "ds_tensor", one) for one in model.parameters()]
    after = sum(one.numel() * one.element_size() for one in mine)
    sizes = [getattr(one, "ds_numel", one.numel()) * one.element_size() for one in model.parameters()]
    return {"weights": weights(model), "peak": counted.peak, "after": after, "whole": sum(sizes), "largest": max(sizes)}
