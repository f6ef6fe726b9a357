"""Temporal models: masked modelling, classification, and a causal language model that reads series as soft tokens."""

# Shapes: B series (rows), N patches, P values of a patch, H width of the encoder, S soft tokens, L tokens, E width of
# the language model.

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dstrain.models.temporal.config import TemporalConfig
from dstrain.models.temporal.encoder import TemporalEncoder


class TemporalPreTrainedModel(PreTrainedModel):
    """Base class: initialization, and what transformers may do with these models."""

    config_class = TemporalConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["TemporalLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        from transformers import initialization as init

        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class _EncoderModel(TemporalPreTrainedModel):
    """Base class of models without a language model."""

    encoder: TemporalEncoder

    def get_input_embeddings(self) -> Any:
        return self.encoder.patch_projection


class TemporalForMaskedModeling(_EncoderModel):
    """The encoder and a linear layer that reconstructs masked patches."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__(config)
        self.encoder = TemporalEncoder(config)
        self.mask_embedding = nn.Linear(1, config.hidden_size, bias=False)
        self.reconstruction = nn.Linear(config.hidden_size, config.patch_length)
        self.post_init()

    def forward(
        self, series: torch.Tensor, series_positions: torch.Tensor, series_masked: torch.Tensor
    ) -> torch.Tensor:
        """Return the normalized values of each patch, (B, N, P). series_masked (B, N): 1 where a patch is hidden."""
        masked = series_masked[..., None].to(self.mask_embedding.weight.dtype)
        return self.reconstruction(self.encoder(series, series_positions, self.mask_embedding(masked)))


class TemporalForClassification(_EncoderModel):
    """The encoder, the mean over its patches, and a linear layer."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__(config)
        self.encoder = TemporalEncoder(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, series: torch.Tensor, series_positions: torch.Tensor) -> torch.Tensor:
        """Return a logit per label, (B, num_labels)."""
        hidden = self.encoder(series, series_positions)  # (B, N, H)
        kept = series_positions[..., 2:].to(hidden.dtype)  # (B, N, 1)
        return self.classifier((hidden * kept).sum(1) / kept.sum(1))


class TemporalForConditionalGeneration(TemporalPreTrainedModel, GenerationMixin):
    """A causal language model in which the encoder's outputs take the place of placeholder tokens.

    The projector has two layers, as in LLaVA-1.5 (Liu et al., arXiv 2310.03744). A soft token is made of
    `patches_per_token` neighbouring patches of one channel.
    """

    base_model_prefix = ""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__(config)
        width = config.get_text_config().hidden_size
        self.encoder = TemporalEncoder(config)
        self.projector = TemporalProjector(config.hidden_size * config.patches_per_token, width)
        self.language_model = AutoModelForCausalLM.from_config(config.text_config)
        names = getattr(self.language_model, "_tied_weights_keys", None) or {}
        # transformers looks tied weights up in the outermost model.
        self._tied_weights_keys = {f"language_model.{one}": f"language_model.{other}" for one, other in names.items()}
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: Any) -> None:
        self.language_model.set_output_embeddings(value)

    def get_decoder(self) -> Any:
        return self.language_model

    def encode_series(self, series: torch.Tensor, series_positions: torch.Tensor) -> torch.Tensor:
        """Return the soft tokens of all series, one row after the other, and after them those of padding, (B * S, E)."""
        hidden, group = self.encoder(series, series_positions), self.config.patches_per_token
        soft = self.projector(hidden.reshape(len(hidden), -1, group * hidden.shape[-1]))  # (B, S, E)
        # A group of patches is real or padding as a whole: channels are padded to whole groups.
        is_padding = series_positions[:, ::group, 2] == 0  # (B, S)
        # Sorted instead of selected: a GPU would make the host wait to learn how many are real.
        return soft.flatten(0, 1).index_select(0, is_padding.flatten().byte().argsort(stable=True))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        series: torch.Tensor | None = None,
        series_positions: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the language model's output on (B, L) ids, with logits of the last `logits_to_keep` positions."""
        embedded = self.get_input_embeddings()(input_ids.clamp(min=0))  # (B, L, E)
        if series is not None and series_positions is not None:
            soft = self.encode_series(series, series_positions)  # (B * S, E)
            places = input_ids == self.config.series_token_id  # (B, L)
            # The n-th placeholder takes the n-th real soft token; masked_scatter would wait for the GPU when it returns.
            order = (places.flatten().cumsum(0) - 1).clamp(0, len(soft) - 1)  # (B * L,)
            found = soft.to(embedded.dtype).index_select(0, order).view_as(embedded)
            embedded = torch.where(places[..., None], found, embedded)
        return self.language_model(
            inputs_embeds=embedded, attention_mask=attention_mask, logits_to_keep=logits_to_keep, **kwargs
        )

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, is_first_iteration: bool | None = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the inputs of a step; the series enter with the prompt, and are in the cache from then on."""
        inputs = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration and kwargs.get("use_cache", True):
            inputs = {name: value for name, value in inputs.items() if not name.startswith("series")}
        return inputs


class TemporalProjector(nn.Module):
    """Two linear layers from the encoder's width to the language model's."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features, out_features)
        self.linear_2 = nn.Linear(out_features, out_features)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear_2(torch.nn.functional.gelu(self.linear_1(hidden)))
