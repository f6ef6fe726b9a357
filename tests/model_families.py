"""Configs of tiny models of many families, by transformers' model_type."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8, "sliding_window": 16},
    "gemma2": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 16},
    "mixtral": LOCAL_EXPERTS,
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "olmoe": EXPERTS,
    "qwen3_next": {
        **EXPERTS, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {
        "intermediate_size": None, "num_attention_heads": None, "num_key_value_heads": None, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2,
        "chunk_size": 16,
    },
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 16},
    "smollm3": {},
    "glm4": {"head_dim": 8},
}  # fmt: skip

_OLDER: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": {**_OLDER, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 320, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "gpt_neox": {**_OLDER, "intermediate_size": 48},
    "phi": {**_OLDER, "intermediate_size": 48},
    "starcoder2": {**BASE, "sliding_window": None},
    "stablelm": BASE,
    "olmo2": BASE,
    "nemotron": BASE,
    "bloom": {"vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}  # fmt: skip
"""Families whose decoders are of other kinds: parallel attention, older names, biases."""


def family(name: str) -> dict[str, Any]:
    """Return the `model.config` of a tiny model."""
    given = {**BASE, **FAMILIES[name]} if name in FAMILIES else MORE_FAMILIES[name]
    tokens = dict.fromkeys(NULLS)  # some families have default ids outside of a small vocabulary
    values = {**tokens, **{key: value for key, value in given.items() if value is not None or key in NULLS}}
    return {"model_type": name, **values}


NULLS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Keys whose null is kept: some families have default token ids outside of a small vocabulary."""
