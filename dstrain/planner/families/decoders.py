"""Parameters of model families, derived from their config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dstrain.planner.families.vision import PROJECTORS, VISION_FAMILIES
from dstrain.planner.shape import ModelShape, ParamTensor, part_of

# Shapes: H width, A heads times head width, K key-value heads times head width, I width of the MLP, V vocabulary.


@dataclass(frozen=True)
class Family:
    """What a family of decoders has besides the layers of Llama, and transformers' defaults of its config."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    norms_per_layer: int = 2
    has_softcap: bool = False


_LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32}  # fmt: skip
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN_VL = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8}  # fmt: skip
_GEMMA = {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
          "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA),
    "mistral": Family({**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "qwen2": Family(_QWEN, has_qkv_bias=True),
    "qwen3": Family({**_QWEN, "head_dim": 128}, has_qk_norm=True),
    "qwen2_5_vl_text": Family(_QWEN_VL, has_qkv_bias=True),
    "gemma": Family(_GEMMA),
    "gemma2": Family(
        {**_GEMMA, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
         "num_key_value_heads": 4}, norms_per_layer=4, has_softcap=True,
    ),
    "gemma3_text": Family(
        {**_GEMMA, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4}, norms_per_layer=4, has_qk_norm=True,
    ),
}  # fmt: skip
"""Model type -> its family. tests/unit/planner/families/test_decoders.py compares each with transformers' model on the meta device."""
WRAPPERS = {"llava": "llama", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Model type with images -> default type of its text model."""


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a causal or vision-language model, None for a family that is not in the tables."""
    model_type = str(config.get("model_type"))
    if model_type not in WRAPPERS:
        return _decoder(config, "model.")
    text = dict(config.get("text_config") or {})
    if model_type.startswith("qwen"):  # the text settings are at the top of older config files
        text = {**{key: value for key, value in config.items() if key in _QWEN_VL}, **text}
    text["model_type"] = text.get("model_type", WRAPPERS[model_type])
    if text["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        text["model_type"] += "_text"
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    decoder = _decoder({**text, "tie_word_embeddings": tied}, "model.language_model.")
    family = VISION_FAMILIES.get(_vision_type(config))
    if decoder is None or family is None:
        return None
    vision, tower = family(config.get("vision_config") or {}, config)
    tensors = (*tower, *PROJECTORS[model_type](vision, decoder.hidden, config), *decoder.tensors)
    return replace(decoder, model_type=model_type, tensors=tensors, vision=vision)


def _vision_type(config: Mapping[str, Any]) -> str:
    own = (config.get("vision_config") or {}).get("model_type")
    return str(own or {"llava": "clip_vision_model"}.get(str(config["model_type"]), config["model_type"]))


def _decoder(config: Mapping[str, Any], prefix: str) -> ModelShape | None:
    """Return the shape of a decoder with Llama's layers; None for another family."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    values = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    shape = ModelShape(
        model_type=str(config["model_type"]),
        hidden=hidden,
        intermediate=int(values["intermediate_size"]),
        layers=int(values["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        vocab=int(values["vocab_size"]),
        tied=bool(values.get("tie_word_embeddings", False)),
        tensors=(),
        has_qk_norm=family.has_qk_norm,
        norms_per_layer=family.norms_per_layer,
        has_softcap=family.has_softcap and values.get("attn_logit_softcapping", 50.0) is not None,
    )
    has_bias = bool(values.get("attention_bias", False))
    biases = (family.has_qkv_bias or has_bias, has_bias, bool(values.get("mlp_bias", False)))
    sizes = _decoder_tensors(shape, biases, prefix)
    return replace(shape, tensors=tuple(ParamTensor(name, size, part_of(name)) for name, size in sizes))


_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _decoder_tensors(
    shape: ModelShape, biases: tuple[bool, bool, bool], prefix: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and size of the decoder's parameters. `biases`: of q, k and v, of o, and of the MLP."""
    hidden, wide = shape.hidden, shape.heads * shape.head_dim
    narrow, inner = shape.kv_heads * shape.head_dim, shape.intermediate
    qkv, out, mlp = biases
    linears = [("self_attn.q_proj", wide, hidden, qkv), ("self_attn.k_proj", narrow, hidden, qkv),
               ("self_attn.v_proj", narrow, hidden, qkv), ("self_attn.o_proj", hidden, wide, out),
               ("mlp.gate_proj", inner, hidden, mlp), ("mlp.up_proj", inner, hidden, mlp),
               ("mlp.down_proj", hidden, inner, mlp)]  # fmt: skip
    yield f"{prefix}embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        at = f"{prefix}layers.{layer}."
        for name, rows, columns, has_bias in linears:
            yield f"{at}{name}.weight", (rows, columns)
            if has_bias:
                yield f"{at}{name}.bias", (rows,)
        if shape.has_qk_norm:
            yield from ((f"{at}self_attn.{name}_norm.weight", (shape.head_dim,)) for name in "qk")
        yield from ((f"{at}{name}.weight", (hidden,)) for name in _NORMS[: shape.norms_per_layer])
    yield f"{prefix}norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, hidden)


def generic_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of a model of another family by the usual names of its config, without tensors."""
    text = config.get("text_config") or config.get("decoder") or config

    def find(names: str, default: int) -> int:
        return next((int(text[name]) for name in names.split() if isinstance(text.get(name), int)), default)

    hidden = find("hidden_size n_embd d_model dim width", 768)
    heads = find("num_attention_heads n_head n_heads num_heads", 12)
    return ModelShape(
        model_type=str(config.get("model_type")),
        hidden=hidden,
        intermediate=find("intermediate_size n_inner ffn_dim d_ff d_inner", 4 * hidden),
        layers=find("num_hidden_layers n_layer n_layers num_layers", 12),
        heads=heads,
        kv_heads=find("num_key_value_heads num_kv_heads", heads),
        head_dim=find("head_dim", hidden // max(heads, 1)),
        vocab=find("vocab_size", 1),
        tied=bool(config.get("tie_word_embeddings", True)),
        tensors=(),
    )
