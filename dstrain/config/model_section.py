"""The recipe's section on the model. The string under a field is its help text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dstrain.config.field_types import Fraction, PositiveInt


class Section(BaseModel):
    """A frozen block of the recipe that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class LoraConfig(Section):
    rank: PositiveInt = 16
    """Rank of the two thin matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Fraction = 0.0
    """Dropout in front of the adapter."""
    targets: str | list[str] = "all-linear"
    """Names of the modules that get an adapter."""
    dora: bool = False
    """Weight-decomposed adapters (DoRA)."""


class TokenizerConfig(Section):
    train: Literal["bpe"] = "bpe"
    """How: a byte-level byte-pair encoding, trained on data.train and kept in the run folder."""
    vocab_size: PositiveInt
    """Entries, special tokens included."""
    alphabet: Literal["bytes", "data"] = "bytes"
    """bytes: every text can be written; data: only the letters of the training texts, for small vocabularies."""


class ProcessorConfig(Section):
    normalize: Literal["data"] | None = None
    """data: mean and deviation of the training images per channel; empty: the family's own."""


class ModelConfig(Section):
    path: str | None = None
    """Local folder or hub id of a transformers model."""
    config: dict[str, Any] | None = None
    """Instead of `path`: a transformers config (with `model_type`) to build a model from scratch."""
    tokenizer: str | TokenizerConfig | None = None
    """Folder or hub id, or {train: bpe, vocab_size: N}. Empty: the one of `path`; with `config`, one trained on data.train with the config's vocab_size."""
    processor: str | ProcessorConfig | None = None
    """Of a model that sees images: folder or hub id of its processor; empty: the one of `path`, with `config` one made for its family."""
    chat_template: str | None = None
    """How dialogs are written, instead of the tokenizer's own way: a Jinja template, its file, or the word turns (Human and Assistant by turns, each answer ended by EOS)."""
    init: str | None = None
    """Weights to start from: safetensors, or an old .pt with or without "module." prefixes."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights as loaded; empty: float32, which DeepSpeed casts as `precision` says."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Attention kernel; auto leaves the choice to transformers."""
    lora: LoraConfig | None = None
    """Train thin adapters instead of the weights."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep frozen weights in 4 or 8 bits (extra [quantize])."""
    freeze: list[str] = []
    """Parameters to leave alone: names, beginnings of names or globs; of a model that sees images also vision, projector, language."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    trust_remote_code: bool = False
    """Let transformers run Python that comes with the model."""
