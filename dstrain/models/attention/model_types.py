"""Model families that take packed batches, and the reasons of those that do not."""

from __future__ import annotations

from typing import Any

PACKED_MODEL_TYPES = frozenset(
    {"arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
     "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen2", "qwen3",
     "qwen3_moe", "seed_oss", "smollm3", "starcoder2"}
)  # fmt: skip
"""Model types whose layers hand their keyword arguments on to the attention function, and whose tokens see others only
there. tests/unit/models/attention/test_model_types.py compares each with padded rows."""
NO_MASK_MODEL_TYPES = frozenset(
    {"cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral",
     "olmoe", "phi3", "qwen2", "qwen3", "smollm3"}
)  # fmt: skip
"""Model types in which every layer is causal and positions count from the start of the row, so that padding on the
right changes nothing before it. tests/unit/tasks/common/test_forward.py checks that their logits are
bit-identical. Others keep their mask: vision-language models (Gemma 3 and PaliGemma attend to images in both
directions, Qwen2-VL counts positions by the mask), models with a recurrent state that padding would change (Mamba 2,
LFM2, Qwen3-Next), encoders.
"""
_LLAVA_TEXTS, _LLAMA = frozenset({"llama", "mistral", "qwen2"}), frozenset({"llama"})
PACKED_VISION_MODEL_TYPES: dict[str, frozenset[str]] = {
    "llava": _LLAVA_TEXTS,
    "idefics3": _LLAMA,
    "smolvlm": _LLAMA,
    "qwen2_vl": frozenset({"qwen2_vl_text"}),
    "qwen2_5_vl": frozenset({"qwen2_5_vl_text"}),
}
"""Model type with images -> types of its text model. Vision towers read images one by one, so that only the text model
has to know the groups. tests/unit/models/attention/test_vision_families.py compares each with padded rows."""

_RECURRENT = "has recurrent layers, which would carry one sequence's state into the next"
_CHUNKED = "attends in chunks of the row, which would cut sequences at other places"
_BIDIRECTIONAL = "attends to a prompt or to images in both directions"
_ENCODER = "attends in both directions"
_ABSOLUTE = "has learned positions that count from the start of the row, or biases by distance within the row"
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
         "minimax", "nemotron_h", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"), _RECURRENT,
    ),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKED),
    **dict.fromkeys(("gemma3", "gemma3n", "paligemma"), _BIDIRECTIONAL),
    **dict.fromkeys(("bert", "deberta", "deberta-v2", "distilbert", "electra", "esm", "modernbert", "roberta", "t5",
                     "xlm-roberta"), _ENCODER),
    **dict.fromkeys(("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt"), _ABSOLUTE),
}  # fmt: skip
"""Model type -> why it cannot take packed batches."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
ROPE_OBSTACLES = ("dynamic", "longrope")
"""Types of rotary frequencies that depend on the longest sequence of a batch."""


def family_unsupported_reason(config: Any) -> str | None:
    """Return why models of a config cannot take packed batches, or None."""
    model_type = str(getattr(config, "model_type", ""))
    if not type(config).__module__.startswith("transformers."):
        return f"the code of {model_type or type(config).__name__} is not part of transformers"
    if model_type in UNSUPPORTED:
        return f"{model_type} {UNSUPPORTED[model_type]}"
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        return _vision_unsupported_reason(config, model_type)
    if getattr(config, "is_encoder_decoder", False):
        return f"{model_type} {_ENCODER} in its encoder"
    if model_type not in PACKED_MODEL_TYPES:
        return f"packed batches are not tested with models of type {model_type}"
    if attends_both_ways(config):
        return f"this {model_type} model {_ENCODER}"
    return layer_unsupported_reason(config)


def attends_both_ways(config: Any) -> bool:
    """Return True where settings of a text model of a causal family let tokens attend to later ones.

    Gemma 4 has the words "all" and "vision"; the second is about the tokens of images.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    return both_ways or getattr(config, "is_causal", True) is False


def _vision_unsupported_reason(config: Any, model_type: str) -> str | None:
    text = config.get_text_config()
    if model_type not in PACKED_VISION_MODEL_TYPES:
        return f"packed batches are not tested with models of type {model_type}, which take images or sound"
    if text.model_type not in PACKED_VISION_MODEL_TYPES[model_type]:
        return f"packed batches are not tested with models of type {model_type} around {text.model_type}"
    return layer_unsupported_reason(text)


def layer_unsupported_reason(config: Any) -> str | None:
    """Return which setting of a text config mixes the sequences of a row, or None."""
    if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - ATTENTION_LAYERS):
        return f"its layers of type {', '.join(unknown)} are not attention to all or to a window of tokens"
    if getattr(config, "model_type", "") == "olmoe" and getattr(config, "sliding_window", None):
        return "its layers hand on a window (sliding_window) that its padded rows do not have"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type in ROPE_OBSTACLES:
            return f"its rotary frequencies ({rope_type}) depend on the longest sequence of a batch"
    return None


PADDING_READERS = ("rwkv", "minimax")
"""Model types that let padding on the left into their state, whatever the attention mask says."""


def length_limit(config: Any) -> tuple[str, int] | None:
    """Return (type, N) of rotary frequencies that change for a whole batch if one of its rows has more than N tokens."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    found = next((rope_type for rope_type in _rope_types(parameters) if rope_type in ROPE_OBSTACLES), None)
    original = [
        block.get("original_max_position_embeddings")
        for block in (parameters, *parameters.values())
        if isinstance(block, dict)
    ]
    limits = [*original, getattr(text, "original_max_position_embeddings", None)] if found == "longrope" else []
    limit = next((one for one in limits if one), getattr(text, "max_position_embeddings", None))
    return (found, int(limit)) if found and limit else None


def needs_equal_prompt_lengths(config: Any) -> bool:
    """Return whether an answer depends on the padding of its prompt, or on longer prompts beside it."""
    text = config.get_text_config()
    return text.model_type in PADDING_READERS or length_limit(config) is not None


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """Return the types in `rope_parameters`, which may be one block or a block per layer type."""
    blocks = [parameters, *(block for block in parameters.values() if isinstance(block, dict))]
    return [str(block["rope_type"]) for block in blocks if "rope_type" in block]
