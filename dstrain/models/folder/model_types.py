"""Position limits and attention direction of model types, from config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.errors import Fault

TEMPORAL_TYPE = "dstrain_temporal"
"""Model type of task temporal's models."""
POSITION_KEYS = ("max_position_embeddings", "n_positions")
"""Config settings with the number of learned positions."""
LEARNED_POSITION_TYPES = frozenset({
    "albert", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "canine", "codegen", "convbert", "ctrl", "distilbert", "electra", "ernie", "flaubert", "fnet", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart", "megatron-bert", "mobilebert", "mvp", "openai-gpt", "opt", "pegasus",
    "plbart", "rembert", "roc_bert", "roformer", "squeezebert", "xlm",
})  # fmt: skip
"""Model types with a learned position table of the configured size."""
PAD_OFFSET_TYPES = frozenset({
    "camembert", "data2vec-text", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xmod",
})  # fmt: skip
"""Model types whose positions start after the pad token's id (transformers' `create_position_ids_from_input_ids`)."""
BIDIRECTIONAL_TYPES = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Encoders whose AutoModelForCausalLM attends in both directions unless the config has `is_decoder: true`."""


def quantized_fault(config: Mapping[str, Any], key: str) -> Fault | None:
    """Return the fault of a model whose files hold quantized weights, by its config.json; None for any other."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown"
    problem = f"its weights are already quantized (quantization_config in its config.json, quant_method {method})"
    return Fault(
        key, problem, "name the original model in 16 bits, and set model.quantize: nf4 to train adapters on it"
    )


def max_learned_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens with learned positions; None where config.json alone does not determine it.

    Needs no torch. `dstrain.models.checks.max_positions` inspects the model itself, for every family.
    """
    model_type = config.get("model_type")
    size = next((config[name] for name in POSITION_KEYS if isinstance(config.get(name), int)), None)
    if (
        size is None
        or model_type not in LEARNED_POSITION_TYPES | PAD_OFFSET_TYPES
        or "rotary" in str(config.get("position_embedding_type"))
    ):
        return None
    pad = config.get("pad_token_id", 1)
    return size - ((pad if isinstance(pad, int) else 1) + 1 if model_type in PAD_OFFSET_TYPES else 0)


def max_length_fault(max_length: int, limit: int) -> Fault:
    """Return the fault of a `data.max_length` above the model's learned positions."""
    problem = f"is {max_length}, but the model has only {limit} learned positions"
    return Fault("data.max_length", problem, f"write {limit} or less, or use a model with rotary positions")


def is_bidirectional(model_type: str, is_decoder: object) -> bool:
    """Return True where the causal language model of this type attends to later tokens."""
    return model_type in BIDIRECTIONAL_TYPES and is_decoder is not True


def is_temporal_folder(name: str | None) -> bool:
    """Return True for a local folder with the config of a temporal model."""
    try:
        values = json.loads((Path(name or "").expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("model_type") == TEMPORAL_TYPE
