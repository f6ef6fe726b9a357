"""A model's config made small: few layers of each kind, narrow, few experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.load import build_meta_model, error_reason

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

WIDTH = 64
HEADS, HEAD_DIM = 4, 16
"""Their product is WIDTH, which some families require."""
LAYERS_OF_A_KIND = 2
MOST_LAYERS = 24
"""Layers of a shrunk model, where a kind comes once in many."""

_SIZES: tuple[tuple[str, int], ...] = (
    (r"linear_num_heads|index_n_heads|linear_num_key_heads", 2),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*_rank|adapter_.*rank", 16),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r".*num_experts_per_tok|moe_topk|moe_top_k|moe_k|num_experts_per_token|top_k_experts|num_selected_experts", 2),
    (r"(num|n)_(local_|routed_|shared_)?experts|moe_num_(shared_)?experts|zero_expert_num", 4),
    (r"n_group|num_expert_group|n_expert_groups|n_groups|.*ngroups|mamba_n_groups", 2),
    (r"topk_group", 1),
    (r"ssm_state_size|state_size|mamba_d_state", 16),
    (r".*chunk_size|attention_chunk_size|block_size|index_block_size", 16),
    (r"sliding_window|sliding_window_size|attention_window_size|local_attention|window_size_left", 16),
    (r"index_topk|index_topk_blocks", 8),
    (r"hidden_size_per_layer_input|ple_embed_dim", 16),
    (r".*(intermediate|ffn|feed_forward).*(size|dim)|d_ff|dff|n_inner|mlp_dim|dim_ff|d_inner|mlp_hidden_size|.*expert_dim", 2 * WIDTH),
    (r"(.*_)?(hidden|embed|embedding|attention_hidden|projection|proj)_(size|dim|width)", WIDTH),
    (r"d_model|n_embd|emb_dim|lru_width|out_hidden_size|output_dim|.*projection_dim|.*output_dim|.*input_dim", WIDTH),
    (r"hidden_dim|aligner_.*dim|adapter_(in|out)_dim|word_embed_proj_dim|image_text_hidden_size|input_embedding_size", WIDTH),
)  # fmt: skip
"""Pattern of a setting's whole name -> its greatest value in a shrunk model; the first that matches decides."""
_LAYERS = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|layers|depth|num_decoder_layers|num_blocks"
)
_HEADS = re.compile(
    r"(swa_|num_sliding_)?(num_)?(attention|attn)_heads|n_heads?|num_heads|(de|en)coder_attention_heads|attention_heads|"
    r"swa_num_attention_heads|num_sliding_attention_heads|mamba_num_heads|resampler_n_heads"
)
_KEY_VALUE_HEADS = re.compile(
    r"(swa_|num_)?(num_)?(key_value|kv|global_key_value|sliding_key_value)_heads|n_head_kv|kv_n_heads|swa_num_key_value_heads|"
    r"num_global_key_value_heads"
)
_HEAD_DIM = re.compile(
    r"(.*_)?head_dim|head_size|d_kv|d_head|dim_head|kv_channels|attention_head_size|qk_(nope|rope)_head_dim|"
    r"mamba_d_head|mamba_headdim|head_width|index_head_dim|rotary_dim"
)
_LAYER_INDICES = re.compile(
    r"deepstack_visual_indexes|fullatt_block_indexes|global_attn_indexes|intermediate_layers_indices|vision_feature_layer|"
    r"feature_layers?|.*layer_(ids|idxs|indices|indexes)|full_attn_idxs|moe_layers|mlp_only_layers|rope_scaling_layers"
)
_VOCABULARY = re.compile(r"vocab_size|vocab_size_per_layer_input|unpadded_vocab_size|text_vocab_size")
_TOKEN_ID = re.compile(r".*token_(id|index)|.*_patch_id")
_TOWERS = re.compile(
    r".*(vision|audio|visual|speech|vit|vq|image|tower|sam|qformer|perceiver|codec|projector|resampler).*"
)
"""Names of configs inside a config that are not those of the text model."""


def shrink_config(
    config: PretrainedConfig, auto_class: Any, vocab_size: int, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the config of a small model of the same family, with at least two layers of each kind of the text model.

    The first layers are kept, so that every pattern of layers stays what it is. Raises RecipeError for a config from
    which no model can be built any more.
    """
    narrow = _rebuild(config, _shrink_values(config.to_dict(), vocab_size))
    kinds = describe_layers(narrow, auto_class, trust_remote_code)
    return _rebuild(narrow, _cut_layers(narrow.to_dict(), count_layers_to_keep(kinds), len(kinds)))


def describe_layers(config: PretrainedConfig, auto_class: Any, trust_remote_code: bool = False) -> list[str]:
    """Return a text for each layer of the text model; layers of one kind have the same."""
    named = ModelConfig(path=".", trust_remote_code=trust_remote_code)
    model, text = build_meta_model(auto_class, named, config), config.get_text_config()
    lists = [value for _, value in sorted(text.to_dict().items()) if _is_per_layer(value, _num_layers(text))]
    layers = _find_layers(model, _num_layers(text))
    kinds = []
    for index, layer in enumerate(layers):
        words = [str(values[index]) for values in lists if not isinstance(values[index], int | float)]
        modules = [f"{name}:{type(module).__name__}" for name, module in layer.named_modules()]
        kinds.append(" ".join([*words, *modules]))
    return kinds


def count_layers_to_keep(kinds: Sequence[str]) -> int:
    """Return how many of the first layers hold two of each kind, or all of a kind that comes once."""
    missing = {kind: min(LAYERS_OF_A_KIND, kinds.count(kind)) for kind in kinds}
    for number, kind in enumerate(kinds, start=1):
        missing[kind] -= 1
        if number >= LAYERS_OF_A_KIND and max(missing.values()) <= 0:
            return number
        if number == MOST_LAYERS:
            return number
    return max(len(kinds), LAYERS_OF_A_KIND)


def _num_layers(text: Any) -> int:
    return int(getattr(text, "num_hidden_layers", 0) or 0)


def _is_per_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers and layers > 1


def _find_layers(model: torch.nn.Module, number: int) -> Sequence[torch.nn.Module]:
    """Return the decoder's layers: the list of so many modules with the most parameters."""
    import torch

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == number]
    if not lists:
        return []
    return max(lists, key=lambda listed: sum(parameter.numel() for parameter in listed.parameters()))


def _rebuild(config: PretrainedConfig, values: Mapping[str, Any]) -> PretrainedConfig:
    try:
        return type(config).from_dict(dict(values))
    except Exception as error:  # transformers validates some values, and fails with any error on others
        raise _shrink_error(config, error) from error


def _shrink_error(config: PretrainedConfig, error: Exception) -> RecipeError:
    problem = f"a config of a {config.model_type} model cannot be made small ({error_reason(error)})"
    fix = "verify knows the settings of transformers' families; give a small model of this family"
    return RecipeError(Fault("model.path", problem, fix))


def _shrink_values(values: Mapping[str, Any], vocab_size: int, is_tower: bool = False) -> dict[str, Any]:
    """Return the settings of a config, and of the configs inside, with small sizes; the number of layers stays."""
    small: dict[str, Any] = {}
    for name, value in values.items():
        if _is_config(name, value):
            small[name] = _shrink_values(value, vocab_size, is_tower or bool(_TOWERS.fullmatch(name)))
        elif _TOKEN_ID.fullmatch(name) and not is_tower and isinstance(value, int | list):
            small[name] = _limit_ids(value, vocab_size)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _shrink_number(name, value, values, vocab_size, is_tower)
        else:
            small[name] = value
    _keep_ratios(small, values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(name), dict):
            small[name] = _shrink_rope(small[name], small)
    return _cut_tower(small) if is_tower else small


def _limit_ids(ids: int | list[Any], vocab_size: int) -> int | list[Any]:
    """Return ids that the small vocabulary has; those of the model's tokenizer stay."""
    if isinstance(ids, list):
        return [min(token, vocab_size - 1) if isinstance(token, int) else token for token in ids]
    return min(ids, vocab_size - 1)


def _shrink_number(name: str, value: int, values: Mapping[str, Any], vocab_size: int, is_tower: bool) -> int:
    if _VOCABULARY.fullmatch(name):
        return value if is_tower else min(value, vocab_size)
    if _KEY_VALUE_HEADS.fullmatch(name):
        heads = next(
            (count for key, count in values.items() if _HEADS.fullmatch(key) and isinstance(count, int)), value
        )
        return HEADS if value == heads >= HEADS else min(value, 2)
    if _HEADS.fullmatch(name):
        return min(value, HEADS)
    if _HEAD_DIM.fullmatch(name):
        return min(value, _head_dim(values))
    for pattern, greatest in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, greatest)
    return value


def _head_dim(values: Mapping[str, Any]) -> int:
    """Return the width of a head: enough for rotary frequencies that take a part of it."""
    rope = values.get("rope_parameters") or {}
    factors = [values.get("partial_rotary_factor"), rope.get("partial_rotary_factor")]
    factors += [block.get("partial_rotary_factor") for block in rope.values() if isinstance(block, dict)]
    factor = min([given for given in factors if given] or [1.0])
    return int(min(max(HEAD_DIM / factor, HEAD_DIM), WIDTH))


def _keep_ratios(small: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Correct the sizes that follow from others: groups of heads, inner widths."""
    keys, answers = values.get("linear_num_key_heads"), values.get("linear_num_value_heads")
    if keys and answers:
        small["linear_num_value_heads"] = 2 * min(answers // keys, 2)
    if isinstance(values.get("qk_rope_head_dim"), int) and isinstance(values.get("qk_nope_head_dim"), int):
        small["qk_head_dim"] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
        same = next(
            (name for name in ("qk_head_dim", "qk_rope_head_dim") if values.get(name) == values.get("head_dim")), None
        )
        if same and "head_dim" in values:
            small["head_dim"] = small[same]
    if isinstance(values.get("attention_hidden_size"), int) and isinstance(values.get("attention_head_dim"), int):
        small["attention_hidden_size"] = values["attention_hidden_size"] * WIDTH // values["hidden_size"]
        small["attention_head_dim"] = small["attention_hidden_size"] // small["num_attention_heads"]
    expand = next((values[name] for name in ("mamba_expand", "expand") if isinstance(values.get(name), int)), None)
    for heads, width in (
        ("mamba_n_heads", "mamba_d_head"),
        ("num_heads", "head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
    ):
        if expand and heads in values and isinstance(values.get(width), int) and "hidden_size" in small:
            small[heads] = expand * small["hidden_size"] // small[width]
    if "mamba_d_ssm" in values:
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]


def _shrink_rope(rope: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings whose sections and factors fit the small heads."""
    width = small.get("head_dim") or WIDTH // max(small.get("num_attention_heads") or HEADS, 1)
    if small.get("qk_rope_head_dim"):
        width = small["qk_rope_head_dim"]
    partial = rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
    pairs = int(width * partial) // 2
    fitted: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            fitted[name] = _shrink_rope(value, small)
        elif name == "mrope_section" and isinstance(value, list):
            fitted[name] = _split(pairs, value)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            fitted[name] = value[:pairs]
        else:
            fitted[name] = value
    return fitted


def _split(total: int, shares: Sequence[int]) -> list[int]:
    """Return whole numbers of this sum in about these shares, none of them 0."""
    parts = [max(1, total * share // sum(shares)) for share in shares]
    parts[0] += total - sum(parts)
    return parts


def _cut_layers(values: Mapping[str, Any], layers: int, before: int) -> dict[str, Any]:
    """Return the settings with the first `layers` of the text model's `before` layers; towers stay as they are."""
    return {name: _cut_setting(name, value, layers, before) for name, value in values.items()}


def _cut_setting(name: str, value: Any, layers: int, before: int) -> Any:
    if name == "per_layer_config" and isinstance(value, dict):
        return {index: block for index, block in value.items() if int(index) < layers}
    if _is_config(name, value):
        return value if _TOWERS.fullmatch(name) else _cut_layers(value, layers, before)
    if name == "vision_feature_layer":
        return _limit_feature_layers(value)
    if _LAYERS.fullmatch(name) and value == before:
        return layers
    if _LAYER_INDICES.fullmatch(name) and isinstance(value, list):
        return [index for index in value if isinstance(index, int) and index < layers]
    if name == "num_kv_shared_layers" and value:
        return min(value, layers // 2)
    return value[:layers] if _count_items(name, value) == before > 1 else value


def _cut_tower(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tower with two layers."""
    counts = [value for name, value in values.items() if _LAYERS.fullmatch(name) and isinstance(value, int)]
    before, cut = max(counts, default=0), dict(values)
    for name, value in values.items():
        if _LAYERS.fullmatch(name) and isinstance(value, int):
            cut[name] = min(value, LAYERS_OF_A_KIND)
        elif name == "vision_feature_layer":
            cut[name] = _limit_feature_layers(value)
        elif _LAYER_INDICES.fullmatch(name) and isinstance(value, list):
            cut[name] = [*range(min(len(value), LAYERS_OF_A_KIND))]
        elif _LAYER_INDICES.fullmatch(name) and isinstance(value, int):
            cut[name] = min(value, LAYERS_OF_A_KIND - 1)
        elif _count_items(name, value) == before > 1:
            cut[name] = value[:LAYERS_OF_A_KIND]
    return cut


def _limit_feature_layers(value: Any) -> Any:
    """Return layers that a small tower has, as many as before: the projector takes all of them side by side."""
    if isinstance(value, list):
        return [_limit_feature_layers(index) for index in value]
    return min(max(value, -LAYERS_OF_A_KIND), LAYERS_OF_A_KIND - 1) if isinstance(value, int) else value


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, dict) and (name.endswith("_config") or "model_type" in value)


def _count_items(name: str, value: Any) -> int:
    """Return of how many layers a setting speaks: a list with an item of each, or a pattern with a letter of each."""
    is_pattern = isinstance(value, str) and name.endswith("pattern")
    return len(value) if is_pattern or isinstance(value, list) else 0
