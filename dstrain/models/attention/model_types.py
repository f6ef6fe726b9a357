"""Which models take packed batches, by the kinds of their layers; what padding on the left and lengths do to others."""

from __future__ import annotations

from typing import Any

from dstrain.models.attention.layer_kinds import find_wrapper_problem, read_layer_kinds

MASKED_LAYERS = frozenset({"full_attention", "sliding_attention", "linear_attention"})
"""Values of `layer_types` whose masks follow from the groups of a packed row; other words than "…attention" are of
layers without attention."""
ROPE_OBSTACLES = ("dynamic", "longrope")
"""Types of rotary frequencies that depend on the longest sequence of a batch."""


def family_unsupported_reason(config: Any) -> str | None:
    """Return why models of a config cannot take packed batches, or None.

    A model takes them where each kind of its layers is known to keep sequences apart: `read_layer_kinds`.
    """
    model_type = str(getattr(config, "model_type", ""))
    if not type(config).__module__.startswith("transformers."):
        return f"the code of {model_type or type(config).__name__} is not part of transformers"
    if getattr(config, "is_encoder_decoder", False):
        return f"{model_type} attends in both directions in its encoder"
    text = config.get_text_config()
    if text is not config:
        problem = find_wrapper_problem(model_type)
        if problem is not None:
            return problem
    if attends_both_ways(text):
        return f"this {text.model_type} model attends in both directions"
    return layer_unsupported_reason(text)


def needs_no_mask(config: Any) -> bool:
    """Return whether padding on the right changes nothing in the tokens before it, without an attention mask.

    Images may have positions or masks that depend on the attention mask.
    """
    if config.get_text_config() is not config or family_unsupported_reason(config) is not None:
        return False
    return read_layer_kinds(config.model_type).needs_no_mask


def attends_both_ways(config: Any) -> bool:
    """Return True where settings of a text model of a causal family let tokens attend to later ones.

    Gemma 4 has the words "all" and "vision"; the second is about the tokens of images.
    """
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    return both_ways or getattr(config, "is_causal", True) is False


def layer_unsupported_reason(config: Any) -> str | None:
    """Return which layer or setting of a text config mixes the sequences of a row, or None."""
    kinds = read_layer_kinds(config.model_type)
    if kinds.unknown is not None:
        return kinds.unknown
    masked = {kind for kind in getattr(config, "layer_types", None) or () if kind.endswith("attention")}
    unknown = sorted(masked - MASKED_LAYERS)
    if unknown:
        return f"its layers of type {', '.join(unknown)} are not attention to all or to a window of tokens"
    if kinds.window_without_mask is not None and getattr(config, "sliding_window", None):
        return f"{kinds.window_without_mask} has a window (sliding_window) that its padded rows do not have"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type in ROPE_OBSTACLES:
            return f"its rotary frequencies ({rope_type}) depend on the longest sequence of a batch"
    return None


def length_limit(config: Any) -> tuple[str, int] | None:
    """Return (type, N) of rotary frequencies that change for a whole batch if one of its rows has more than N tokens."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    obstacle = next((rope_type for rope_type in _rope_types(parameters) if rope_type in ROPE_OBSTACLES), None)
    original = [
        block.get("original_max_position_embeddings")
        for block in (parameters, *parameters.values())
        if isinstance(block, dict)
    ]
    limits = [*original, getattr(text, "original_max_position_embeddings", None)] if obstacle == "longrope" else []
    limit = next((limit for limit in limits if limit), getattr(text, "max_position_embeddings", None))
    return (obstacle, int(limit)) if obstacle and limit else None


def needs_equal_prompt_lengths(config: Any) -> bool:
    """Return whether an answer may depend on the padding of its prompt, or on longer prompts beside it.

    Layers of unknown kinds may let padding on the left into a state (RWKV, xLSTM, MiniMax's lightning attention), or
    count positions from the start of the padded row (TrOCR).
    """
    kinds = read_layer_kinds(config.get_text_config().model_type)
    return kinds.may_read_padding or length_limit(config) is not None


def _rope_types(parameters: dict[str, Any]) -> list[str]:
    """Return the types in `rope_parameters`, which may be one block or a block per layer type."""
    blocks = [parameters, *(block for block in parameters.values() if isinstance(block, dict))]
    return [str(block["rope_type"]) for block in blocks if "rope_type" in block]
