"""Config of temporal models, registered with transformers' AutoConfig."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig, PretrainedConfig

from dstrain.models.folder.model_types import TEMPORAL_TYPE


class TemporalConfig(PretrainedConfig):
    """Sizes of the encoder, and the config of the language model where there is one."""

    model_type = TEMPORAL_TYPE
    sub_configs: ClassVar = {"text_config": AutoConfig}

    def __init__(self, text_config: Any = None, **kwargs: Any) -> None:
        """Take the text config as a config or a dict; the encoder's settings are keyword arguments."""
        self.patch_length = int(kwargs.pop("patch_length", 16))
        self.patches_per_token = int(kwargs.pop("patches_per_token", 1))
        self.hidden_size = int(kwargs.pop("hidden_size", 256))
        self.num_hidden_layers = int(kwargs.pop("num_hidden_layers", 4))
        self.num_attention_heads = int(kwargs.pop("num_attention_heads", 8))
        self.intermediate_size = int(kwargs.pop("intermediate_size", 4 * self.hidden_size))
        self.hidden_dropout_prob = float(kwargs.pop("hidden_dropout_prob", 0.0))
        # Below 0, no tokenizer has it: the vocabulary of a language model stays as it is.
        self.series_token_id = int(kwargs.pop("series_token_id", -1))
        if isinstance(text_config, dict):
            values = dict(text_config)
            text_config = AutoConfig.for_model(values.pop("model_type"), **values)
        self.text_config = text_config
        if text_config is not None:
            kwargs.setdefault("tie_word_embeddings", bool(getattr(text_config, "tie_word_embeddings", False)))
        super().__init__(**kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PretrainedConfig:
        """Return the language model's config; this config where there is no language model."""
        return self if self.text_config is None else self.text_config


AutoConfig.register(TEMPORAL_TYPE, TemporalConfig, exist_ok=True)
