"""Model section of the recipe schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dstrain.config.field_types import (
    AttnImplementation,
    Fraction,
    NonNegativeFloat,
    PositiveInt,
    ShareOfLayers,
)


class Section(BaseModel):
    """Frozen block of the recipe that rejects unknown keys. The string under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class LoraConfig(Section):
    """LoRA adapters."""

    rank: PositiveInt = 16
    """Rank of the two adapter matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    targets: str | list[str] = "all-linear"
    """Names of the modules that get an adapter."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""


class TokenizerConfig(Section):
    """A tokenizer to train."""

    train: Literal["bpe"] = "bpe"
    """bpe: byte-level byte-pair encoding, trained on data.train and saved in the run folder."""
    vocab_size: PositiveInt
    """Vocabulary size, special tokens included."""
    alphabet: Literal["bytes", "data"] = "bytes"
    """bytes: every text can be encoded; data: only the characters of the training texts, for small vocabularies."""


class ProcessorConfig(Section):
    """Settings of a processor built for the model's family."""

    normalize: Literal["data"] | None = None
    """data: normalize by mean and standard deviation per channel of the training images; empty: by the family's values."""


class ModelConfig(Section):
    """The model, its tokenizer and processor, and the trained parameters."""

    path: str | None = None
    """Local folder or Hub id of a transformers model."""
    config: dict[str, Any] | None = None
    """Instead of `path`: a transformers config (with `model_type`) to build a model from scratch."""
    tokenizer: str | TokenizerConfig | None = None
    """Folder or Hub id, or {train: bpe, vocab_size: N}. Empty: the tokenizer of `path`; with `config`, one trained on data.train with the config's vocab_size."""
    processor: str | ProcessorConfig | None = None
    """Folder or Hub id of a vision-language model's processor. Empty: the processor of `path`; with `config`, one built for its family."""
    chat_template: str | None = None
    """Replaces the tokenizer's chat template: a Jinja template, the path of its file, or human_assistant ("Human: … Assistant: …", each answer followed by EOS)."""
    init: str | None = None
    """Initial weights: safetensors, or a .pt file with or without "module." prefixes."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype in which the weights are loaded. Empty: float32; DeepSpeed then casts them to `precision`."""
    attn_implementation: AttnImplementation = "auto"
    """Attention implementation: auto (chosen by transformers), sdpa, eager, flash_attention_2, flash_attention_3, flex_attention, or a kernel on the Hub such as kernels-community/flash-attn2."""
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of the weights."""
    quantize: Literal["nf4", "int8"] | None = None
    """Store the frozen linear layers in 4 bits (nf4: QLoRA, with double quantization) or 8 bits (int8); needs lora and the extra [quantize], and a ZeRO stage below 3."""
    freeze: list[str] = []
    """Parameters to freeze: names, prefixes of names or globs; of a vision-language model also vision, projector, language."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Factor of the router's auxiliary loss of a mixture of experts. Empty: the model config's, if its output_router_logits is true."""
    gradient_checkpointing: ShareOfLayers = True
    """Recompute activations in the backward pass: less memory, about a third more compute. A share such as 0.5: in that share of the layers."""
    trust_remote_code: bool = False
    """Let transformers run Python code from the model's folder or repository."""
