"""Worker functions of the tests of vision-language reward models."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForImageTextToText

from dstrain.config.schema import ModelConfig
from dstrain.models.load import load_model, read_config
from dstrain.models.params import components_by_id, zero3_init
from dstrain.models.reward_model import AutoRewardModel
from tests.parity.cases import ds_config, weights, world


def save(values: dict[str, Any], writer: str, scored: str) -> None:
    """Save a generative model and a reward model with other weights."""
    config = read_config(ModelConfig(config=values))
    AutoModelForImageTextToText.from_config(config).save_pretrained(writer)
    config.num_labels = 1
    load_model(AutoRewardModel(), ModelConfig(config=values), config, 7).save_pretrained(scored)


def started(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a reward model and the number of parameters of each component."""
    model = ModelConfig(**settings)
    config = read_config(model)
    config.num_labels = 1
    with zero3_init(ds_config(kind, {"world_size": world().size, "precision": "fp32"})):
        made = load_model(AutoRewardModel(), model, config, 3)
    known = list(components_by_id(made).values())
    return {
        "weights": weights(made),
        "parts": {part: known.count(part) for part in sorted(set(known))},
        "sharded": all(hasattr(parameter, "ds_id") for parameter in made.parameters()),
    }
