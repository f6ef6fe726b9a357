"""Loading of temporal models: from a temporal model's folder, or around a language model's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from dstrain.models.folder.model_types import TEMPORAL_TYPE
from dstrain.models.params.zero3 import assign
from dstrain.models.temporal.models import (
    TemporalForClassification,
    TemporalForConditionalGeneration,
    TemporalForMaskedModeling,
)
from dstrain.models.weights.load_report import disable_transformers_logging

MODEL_CLASSES: dict[str, type[PreTrainedModel]] = {
    "align": TemporalForConditionalGeneration,
    "sft": TemporalForConditionalGeneration,
    "classify": TemporalForClassification,
    "masked": TemporalForMaskedModeling,
}
"""Stage -> model class."""


@dataclass(frozen=True)
class AutoTemporalModel:
    """Auto class of one stage's models, like transformers' Auto classes. Parts that no file has are initialized."""

    stage: str

    def from_pretrained(self, name: str, *, config: Any = None, **settings: Any) -> PreTrainedModel:
        """Load a temporal model, or a language model with a new encoder, from a folder. Collective under ZeRO-3."""
        settings.pop("trust_remote_code", None)
        own, wanted = AutoConfig.from_pretrained(name), MODEL_CLASSES[self.stage]
        config = own if config is None else config
        # Weights of a language model are one level deeper here.
        renamed = (
            {} if own.model_type == TEMPORAL_TYPE else {"key_mapping": {r"^(?!language_model\.)": "language_model."}}
        )
        start = torch.get_rng_state()
        with disable_transformers_logging(warnings=True):  # else it warns of the new encoder
            model, info = wanted.from_pretrained(name, config=config, output_loading_info=True, **renamed, **settings)
        if renamed:
            # Else transformers writes the language model's keys as they were read, without their prefix.
            model._weight_conversions = None
        init_missing(model, info["missing_keys"], start)
        return model

    def from_config(self, config: Any, **settings: Any) -> PreTrainedModel:
        """Build a model with newly initialized weights."""
        settings.pop("trust_remote_code", None)
        return MODEL_CLASSES[self.stage]._from_config(config, **settings)


def init_missing(model: PreTrainedModel, missing: set[str], rng_state: torch.Tensor) -> None:
    """Initialize the weights with these keys, with the same draws at every ZeRO stage. Collective under ZeRO-3."""
    torch.set_rng_state(rng_state)
    for name, parameter in _iter_missing(model, missing):
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        kind = model.get_submodule(name.rpartition(".")[0])
        # On the CPU in fp32: the same draws for any device, dtype and stage.
        if name.endswith("bias"):
            value = torch.zeros(shape)
        elif isinstance(kind, nn.LayerNorm):
            value = torch.ones(shape)
        else:
            value = torch.randn(shape) * shape[-1] ** -0.5
        assign(parameter, lambda value=value: value)  # type: ignore[misc]


def _iter_missing(model: PreTrainedModel, missing: set[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if name in missing:
            yield name, parameter
