"""Worker functions of the tests of adapter folders."""

from __future__ import annotations

from typing import Any

import transformers

from dstrain.config.schema import ModelConfig
from dstrain.models.load import load_model, read_config
from dstrain.models.params import zero3_init
from tests.parity.cases import ds_config, weights, world


def loaded(kind: str, path: str, auto: str) -> dict[str, Any]:
    """Return the weights of a model whose path is an adapter folder."""
    model = ModelConfig(path=path)
    config = read_config(model)
    config.num_labels = 1
    with zero3_init(ds_config(kind, {"world_size": world().size, "precision": "fp32"})):
        made = load_model(getattr(transformers, auto), model, config, 3)
    return {
        "weights": weights(made),
        "sharded": all(hasattr(parameter, "ds_id") for parameter in made.parameters()),
        "learns": all(parameter.requires_grad for parameter in made.parameters()),
    }
