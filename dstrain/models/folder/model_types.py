"""What a config.json says of a model's family, without transformers: how far its positions reach, and which way it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

POSITION_KEYS = ("max_position_embeddings", "n_positions")
"""Settings with the number of learned positions."""
LEARNED_POSITION_TYPES = frozenset({
    "albert", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "canine", "codegen", "convbert", "ctrl", "distilbert", "electra", "ernie", "flaubert", "fnet", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart", "megatron-bert", "mobilebert", "mvp", "openai-gpt", "opt", "pegasus",
    "plbart", "rembert", "roc_bert", "roformer", "squeezebert", "xlm",
})  # fmt: skip
"""Families with a table of as many positions as the config says."""
PAD_OFFSET_TYPES = frozenset({
    "camembert", "data2vec-text", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xmod",
})  # fmt: skip
"""Families that number positions from behind the pad token (transformers' `create_position_ids_from_input_ids`)."""
BIDIRECTIONAL_TYPES = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Encoders whose AutoModelForCausalLM attends in both directions unless the config has `is_decoder: true`."""


def max_learned_positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model with this config.json has learned positions for; None where the file alone does not say.

    `dstrain.models.checks.max_positions` looks at the model itself, for every family. This one needs no torch.
    """
    kind = config.get("model_type")
    told = next((config[name] for name in POSITION_KEYS if isinstance(config.get(name), int)), None)
    if (
        told is None
        or kind not in LEARNED_POSITION_TYPES | PAD_OFFSET_TYPES
        or "rotary" in str(config.get("position_embedding_type"))
    ):
        return None
    pad = config.get("pad_token_id", 1)
    return told - ((pad if isinstance(pad, int) else 1) + 1 if kind in PAD_OFFSET_TYPES else 0)


def is_bidirectional(model_type: str, is_decoder: object) -> bool:
    """Whether a causal language model of this family sees the tokens that it learns to write."""
    return model_type in BIDIRECTIONAL_TYPES and is_decoder is not True
