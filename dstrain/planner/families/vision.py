"""Parameters of vision encoders and projectors, derived from their config.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dstrain.planner.shape import ParamTensor, VisionShape, part_of

Tensors = tuple[ParamTensor, ...]
DEFAULT_IMAGE_TOKENS = 1024
"""Tokens of an image whose size decides their number (Qwen-VL): one of 896 x 896 pixels."""


def _clip(config: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[VisionShape, Tensors]:
    """Return CLIP's tower as LLaVA uses it: one layer is left out, and so is the token of the class."""
    defaults = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                "image_size": 336, "patch_size": 14, "num_channels": 3}  # fmt: skip
    given = {**defaults, **config}
    hidden, inner, layers = (int(given[key]) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    side, patch = int(given["image_size"]), int(given["patch_size"])
    patches = (side // patch) ** 2
    feature_layer = int(whole.get("vision_feature_layer") or -2)
    vision = VisionShape(
        hidden=hidden, intermediate=inner, layers=feature_layer if feature_layer > 0 else layers + 1 + feature_layer,
        heads=int(given["num_attention_heads"]), patches=patches + 1, tokens=patches, stored_layers=layers,
        patch_values=int(given["num_channels"]) * patch**2,
    )  # fmt: skip
    return vision, _named(_clip_tensors(vision, patch, int(given["num_channels"])))


def _clip_tensors(vision: VisionShape, patch: int, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, at = vision.hidden, "model.vision_tower."
    yield f"{at}embeddings.class_embedding", (hidden,)
    yield f"{at}embeddings.patch_embedding.weight", (hidden, channels, patch, patch)
    yield f"{at}embeddings.position_embedding.weight", (vision.patches, hidden)
    for norm in ("pre_layrnorm", "post_layernorm"):
        yield from ((f"{at}{norm}.{name}", (hidden,)) for name in ("weight", "bias"))
    for layer in range(vision.stored_layers):
        here = f"{at}encoder.layers.{layer}."
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _linear(f"{here}self_attn.{name}", hidden, hidden)
        yield from _linear(f"{here}mlp.fc1", vision.intermediate, hidden)
        yield from _linear(f"{here}mlp.fc2", hidden, vision.intermediate)
        for norm in ("layer_norm1", "layer_norm2"):
            yield from ((f"{here}{norm}.{name}", (hidden,)) for name in ("weight", "bias"))


def _llava_projector(vision: VisionShape, width: int, whole: Mapping[str, Any]) -> Tensors:
    has_bias = bool(whole.get("multimodal_projector_bias", True))
    at = "model.multi_modal_projector.linear_"
    return _named((*_linear(f"{at}1", width, vision.hidden, has_bias), *_linear(f"{at}2", width, width, has_bias)))


def _qwen_2_5_tower(config: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[VisionShape, Tensors]:
    """Return Qwen2.5-VL's tower without its merger."""
    defaults = {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
                "temporal_patch_size": 2, "spatial_merge_size": 2}  # fmt: skip
    given = {**defaults, **config}
    merge = int(given["spatial_merge_size"]) ** 2
    channels = int(given.get("in_channels", given.get("in_chans", 3)))
    patch = (channels, int(given["temporal_patch_size"]), int(given["patch_size"]), int(given["patch_size"]))
    vision = VisionShape(
        hidden=int(given["hidden_size"]), intermediate=int(given["intermediate_size"]), layers=int(given["depth"]),
        heads=int(given["num_heads"]), patches=DEFAULT_IMAGE_TOKENS * merge, tokens=DEFAULT_IMAGE_TOKENS, is_gated=True,
        stored_layers=int(given["depth"]), patch_values=math.prod(patch),
    )  # fmt: skip
    return vision, _named(_qwen_2_5_tensors(vision, patch))


def _qwen_2_5_tensors(vision: VisionShape, patch: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = vision.hidden, vision.intermediate
    yield "model.visual.patch_embed.proj.weight", (hidden, *patch)
    for layer in range(vision.layers):
        at = f"model.visual.blocks.{layer}."
        yield from ((f"{at}{norm}.weight", (hidden,)) for norm in ("norm1", "norm2"))
        yield from _linear(f"{at}attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{at}attn.proj", hidden, hidden)
        yield from _linear(f"{at}mlp.gate_proj", inner, hidden)
        yield from _linear(f"{at}mlp.up_proj", inner, hidden)
        yield from _linear(f"{at}mlp.down_proj", hidden, inner)


def _qwen_2_5_merger(vision: VisionShape, width: int, whole: Mapping[str, Any]) -> Tensors:
    merged = vision.hidden * vision.patches // vision.tokens
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.visual.merger.ln_q.weight", (vision.hidden,))]
    tensors += [
        *_linear("model.visual.merger.mlp.0", merged, merged),
        *_linear("model.visual.merger.mlp.2", width, merged),
    ]
    return _named(tensors)


def _linear(name: str, rows: int, columns: int, has_bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)


def _named(tensors: Any) -> Tensors:
    return tuple(ParamTensor(name, size, part_of(name)) for name, size in tensors)


VISION_FAMILIES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[VisionShape, Tensors]]] = {
    "clip_vision_model": _clip,
    "qwen2_5_vl": _qwen_2_5_tower,
    "qwen2_5_vl_vision": _qwen_2_5_tower,
}
"""Type of a vision encoder -> its sizes and parameters, from vision_config and the whole config."""
PROJECTORS: dict[str, Callable[[VisionShape, int, Mapping[str, Any]], Tensors]] = {
    "llava": _llava_projector,
    "qwen2_5_vl": _qwen_2_5_merger,
}
"""Model type -> the parameters between vision encoder and language model."""
