"""A temporal encoder for curves, joined to a language model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dstrain.errors import UsageError
from dstrain.models.folder import TEMPORAL_TYPE
from dstrain.models.params import assign, full_shape
from dstrain.models.weights import disable_transformers_logging


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


# Shapes: B series, N patches of the longest series, P values of a patch, H width.


NUM_STATS = 2
"""Numbers per channel besides its normalized values: its mean and its scale."""
STATS_SCALE = 0.1
"""Factor of these numbers. As asinh they reach 10, and would hide the values, whose deviation is 1, from the layers."""


class TemporalEncoder(nn.Module):
    """Patches of one or more channels as tokens of a bidirectional transformer.

    Patches as tokens with channels kept apart: PatchTST, Nie et al. (arXiv 2211.14730), section 3.1. Here the patches
    of all channels attend to each other. Values are normalized per channel, and mean and scale are inputs, since
    normalization alone would remove them (Kim et al., RevIN, ICLR 2022).
    """

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        self.config = config
        # A value and whether it is observed, so that a missing value is not a zero.
        self.patch_projection = nn.Linear(2 * config.patch_length, config.hidden_size)
        self.stats_projection = nn.Linear(NUM_STATS, config.hidden_size, bias=False)
        self.channel_projection = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(TemporalLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, series: torch.Tensor, series_positions: torch.Tensor, mask_token: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the state of each patch, (B, N, H).

        series (B, N, 2P + 2): the patch's values, 1 where they are observed, and mean and scale of its channel.
        series_positions (B, N, 3) int64: index of the patch in its channel, of the channel, and 1 (0 for padding).
        mask_token (B, N, H): added to the embedding of each patch.
        """
        dtype, width = self.norm.weight.dtype, self.config.hidden_size
        patches, stats = series.to(dtype).split([series.shape[-1] - NUM_STATS, NUM_STATS], dim=-1)
        patch, channel, is_real = series_positions.unbind(-1)  # (B, N) each
        hidden = self.patch_projection(patches) + self.stats_projection(STATS_SCALE * stats)
        hidden = hidden + sinusoids(patch, width).to(dtype)
        hidden = hidden + self.channel_projection(sinusoids(channel, width).to(dtype))
        if mask_token is not None:
            hidden = hidden + mask_token
        attention_mask = is_real[:, None, None, :] > 0  # (B, 1, 1, N): every patch attends to all that are real
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return self.norm(hidden)


class TemporalLayer(GradientCheckpointingLayer):
    """One pre-norm transformer layer: attention in both directions, then two linear layers."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_attention_heads, config.hidden_dropout_prob
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.attention_output = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return (B, N, H) from (B, N, H) and a mask (B, 1, 1, N)."""
        rows, length, width = hidden.shape
        shape = (rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.attention_norm(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.hidden_dropout(self.attention_output(attended))
        inner = F.gelu(self.intermediate(self.mlp_norm(hidden)))
        return hidden + self.hidden_dropout(self.output(inner))


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines of positions, (...,) -> (..., width) float32.

    Vaswani et al. (arXiv 1706.03762), section 3.5. No table limits the length of a series.
    """
    half = width // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * torch.exp(steps * (-math.log(10000.0) / max(half, 1)))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


# Shapes: B series (rows), N patches, P values of a patch, H width of the encoder, S soft tokens, L tokens, E width of
# the language model.


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
    modules_to_not_convert = ("encoder", "projector")
    """Modules whose layers `model.quantize` leaves as they are: only the language model is quantized."""

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
        """Load a temporal model, or a language model with a new encoder, from a folder. Collective under ZeRO-3.

        Raises UsageError for a folder of adapters.
        """
        if (Path(name) / "adapter_config.json").is_file():
            fix = "`dstrain export --merge-lora` writes the whole model, and dstrain.load reads either"
            raise UsageError(f"{name}: holds adapters alone; {fix}")
        settings.pop("trust_remote_code", None)
        own = AutoConfig.from_pretrained(name, revision=settings.get("revision"))
        wanted = MODEL_CLASSES[self.stage]
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
    for name, parameter in model.named_parameters():
        if name not in missing:
            continue
        shape = full_shape(parameter)
        kind = model.get_submodule(name.rpartition(".")[0])
        # On the CPU in fp32: the same draws for any device, dtype and stage.
        if name.endswith("bias"):
            value = torch.zeros(shape)
        elif isinstance(kind, nn.LayerNorm):
            value = torch.ones(shape)
        else:
            value = torch.randn(shape) * shape[-1] ** -0.5
        assign(parameter, lambda value=value: value)  # type: ignore[misc]
