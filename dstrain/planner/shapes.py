"""Models that are planned: parameters and sizes, from configs, weight files or the meta device."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from dstrain.config import RunConfig, dump_recipe
from dstrain.config.schema import LoraConfig, ModelConfig
from dstrain.errors import Fault, RecipeError, UsageError, suggest_name
from dstrain.files import parse_json
from dstrain.models.checks import read_folder_config
from dstrain.models.folder import (
    find_quantization,
    quantized_fault,
    read_json_object,
    resolve_base_model,
    wrong_size_fault,
)
from dstrain.models.params import Component, check_patterns, is_selected
from dstrain.models.weights import find_weight_files
from dstrain.tasks import make_task
from dstrain.tasks.common.judge import make_judge

Part = Literal["embedding", "layers", "head", "vision", "projector", "lora", "other"]
PARTS: tuple[Part, ...] = ("vision", "projector", "embedding", "layers", "other", "head", "lora")
"""In the order of a plan's lines."""


EXPERT = re.compile(r"\.experts\.\d+\b.*")
"""Rest of a module's name in files that store each expert separately; transformers builds one module of them."""


@dataclass(frozen=True)
class ParamTensor:
    """A parameter of the model; tied weights appear once."""

    name: str
    shape: tuple[int, ...]
    part: Part
    is_trainable: bool = True

    @property
    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def is_linear_weight(self) -> bool:
        """Return True for a matrix of a linear layer inside the layers, vision tower or projector."""
        return len(self.shape) == 2 and self.part in ("layers", "vision", "projector") and "embed" not in self.name

    @property
    def is_of_mlp(self) -> bool:
        """Return True for a parameter, or an adapter, of an MLP that is a module of its own."""
        return re.search(r"\.(mlp|feed_forward)\.", self.name) is not None

    @property
    def is_expert_weight(self) -> bool:
        """Return True for the weights of all experts of a layer: (experts, out, in)."""
        return len(self.shape) == 3 and ".experts." in self.name


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of a vision encoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    patches: int
    """Positions of one image in the encoder: its patches, and the class token of CLIP."""
    patch_values: int
    """Pixel values of one patch, over its channels and frames."""
    tokens: int
    """Tokens of one image in the language model."""
    pixels_per_token: int = 0
    """Pixels of an image for each of its tokens; 0 where every image has the same number of tokens."""
    is_gated: bool = False
    """True for an MLP with a gate (Qwen2.5-VL)."""
    stored_layers: int = 0
    """Layers that run; LLaVA leaves the last one out, whose weights exist."""


@dataclass(frozen=True, kw_only=True)
class TaskProperties:
    """What the planner has to know of a task, read from the task itself."""

    rows_per_sample: int = 1
    """2 for tasks on pairs of answers."""
    is_scored: bool = False
    """True for a score head instead of a language-model head."""
    heads: tuple[str, ...] = ()
    """New parts that are trained in full next to adapters."""
    reference: str = "none"
    """Kind of the reference: none, model, adapter or cached."""
    reference_model: ModelConfig | None = None
    """Another model as reference; None: the policy's own."""
    reward_models: tuple[ModelConfig, ...] = ()
    """Frozen reward models in memory: of each step, and of generated answers; those that score before the training are gone by then."""
    packs_batches: bool = False
    disables_dropout: bool = False
    images_per_row: int = 1
    page_dpi: int | None = None
    """Pixels per inch of images that are rendered pages."""
    is_known: bool = True
    """False for a task whose model is not a transformers model with a language-model or score head."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """Sizes of a decoder, with or without a vision encoder, and all its parameters. Compared by identity."""

    model_type: str
    text_type: str = ""
    """Type of the text model; that of the model itself where it takes no images."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """True where the head is the embedding."""
    tensors: tuple[ParamTensor, ...]
    experts_per_token: int = 0
    """Experts that each token passes; `intermediate` is the sum of their widths. 0: a dense model."""
    has_qk_norm: bool = False
    norms_per_layer: int = 2
    has_softcap: bool = False
    """True where attention caps its logits, which only the eager implementation does."""
    vision: VisionShape | None = None
    param_source: str = "config"
    """config, safetensors headers, or meta device."""
    task: TaskProperties = TaskProperties()
    """The task that trains the model."""

    @property
    def has_fp32_norms(self) -> bool:
        """Return True where norms multiply with their weight in fp32, as Gemma's do."""
        return self.model_type.startswith("gemma")

    @cached_property
    def has_dense_mlp(self) -> bool:
        """Return True where every layer has an MLP that can run in tiles (models/tiles.py)."""
        return not self.experts_per_token and any(one.part == "layers" and one.is_of_mlp for one in self.tensors)

    @cached_property
    def kinds(self) -> tuple[tuple[ParamTensor, int], ...]:
        """One tensor of each size, part and role, and how many there are: sums over 80 equal layers need one of them."""
        found: dict[tuple[Any, ...], tuple[ParamTensor, int]] = {}
        for tensor in self.tensors:
            key = tensor.shape, tensor.part, tensor.is_trainable, tensor.is_linear_weight
            first, count = found.get(key, (tensor, 0))
            found[key] = first, count + 1
        return tuple(found.values())

    @cached_property
    def largest_module(self) -> int:
        """Number of values of the largest module's own tensors; the experts of a layer are one module."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            module = EXPERT.sub(".experts", tensor.name.rpartition(".")[0])
            found[module] = found.get(module, 0) + tensor.numel
        return max(found.values(), default=0)

    def count(self, part: Part | None = None, trainable: bool | None = None) -> int:
        """Return the number of parameters of a part (None: all), trainable or frozen ones (None: both)."""
        return sum(
            tensor.numel * count
            for tensor, count in self.kinds
            if part in (None, tensor.part) and trainable in (None, tensor.is_trainable)
        )


def with_adapters(shape: ModelShape, lora: LoraConfig, heads: Iterable[str]) -> ModelShape:
    """Return the shape with LoRA adapters on its target layers; all but them and `heads` is frozen.

    A weight of (out, in) gets A (rank, in) and B (out, rank); DoRA adds a magnitude (out,). Those of an embedding have
    the same sizes, with `in` for the magnitude. `lora`: the recipe's LoraConfig. Hu et al., arXiv 2106.09685, section
    4.1; Liu et al., arXiv 2402.09353, eq. 5. Raises RecipeError where a target matches nothing.
    """
    embeddings = [one for one in shape.tensors if one.part == "embedding"]
    tied = [replace(one, name="lm_head.weight", part="head") for one in embeddings if shape.tied]
    adapters, trained = [], set()
    for tensor in (*shape.tensors, *tied):
        module = tensor.name.rpartition(".")[0]
        if any(module.endswith(head) for head in heads):
            trained.add(tensor)
            continue
        is_layer = tensor.is_linear_weight if _is_all_linear(lora.targets) else len(tensor.shape) == 2
        if not is_layer or not _is_target(module, lora.targets):
            continue
        rows, columns = tensor.shape
        parts: list[tuple[str, tuple[int, ...]]] = [("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank))]
        parts += [("lora_magnitude_vector", (columns if tensor.part == "embedding" else rows,))] if lora.dora else []
        adapters += [ParamTensor(f"{module}.{name}.weight", size, "lora") for name, size in parts]
    unknown: str | list[str] = [] if adapters or not shape.tensors else lora.targets
    if isinstance(lora.targets, list) and shape.param_source == "config":  # files may have other names than the model
        modules = [one.name.rpartition(".")[0] for one in (*shape.tensors, *tied)]
        unknown = [target for target in lora.targets if not any(_is_target(module, [target]) for module in modules)]
    if unknown:
        linear = {one.name.split(".")[-2] for one in shape.tensors if one.is_linear_weight and "." in one.name}
        problem = f"{unknown!r} match no linear layer of the model"
        raise RecipeError(Fault("model.lora.targets", problem, f"known here: {', '.join(sorted(linear)) or 'none'}"))
    kept = (replace(one, is_trainable=one in trained) for one in shape.tensors)
    return replace(shape, tensors=(*kept, *adapters))


def _is_all_linear(targets: str | list[str]) -> bool:
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _is_target(module: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):  # a regular expression of the whole name, as peft reads it
        try:
            return _is_all_linear(targets) or re.fullmatch(targets, module) is not None
        except re.error as error:
            problem = f"{targets!r} is not a regular expression ({error})"
            raise RecipeError(Fault("model.lora.targets", problem, "correct it, or write a list of names")) from None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def with_frozen(shape: ModelShape, patterns: Sequence[str]) -> ModelShape:
    """Return the shape with the parameters of `model.freeze` frozen. Raises RecipeError for one that matches nothing."""
    components = {one.name: _component(one) for one in shape.tensors} if shape.count("vision") else {}
    names = {one.name: components.get(one.name) for one in shape.tensors}
    if shape.param_source != "safetensors headers":  # whose names are not always those of the model
        check_patterns(names, patterns, "model.freeze")
    frozen = {name for name, part in names.items() if any(is_selected(name, part, pattern) for pattern in patterns)}
    tensors = (replace(one, is_trainable=one.is_trainable and one.name not in frozen) for one in shape.tensors)
    return replace(shape, tensors=tuple(tensors))


def check_group_patterns(shape: ModelShape, patterns: Collection[str]) -> None:
    """Raise RecipeError for a name in optim.groups that matches no trained parameter."""
    has_parts = bool(shape.count("vision"))
    trained = {one.name: _component(one) if has_parts else None for one in shape.tensors if one.is_trainable}
    # As in peft, whose adapters have a name.
    trained |= {re.sub(r"(\.lora_\w+)", r"\1.default", name): part for name, part in trained.items()}
    check_patterns(trained, patterns, "optim.groups")


def _component(tensor: ParamTensor) -> Component | None:
    """Return the component of models/params.py: that of an adapter is its module's, a new head has none."""
    part = part_of(tensor.name.replace(".lora_", "."))
    if part == "vision" or part == "projector":
        return part
    return None if tensor.name.startswith("score.") else "language"


def with_score_head(shape: ModelShape) -> ModelShape:
    """Return the shape of a reward model: a linear score of one value instead of the language-model head."""
    body = tuple(tensor for tensor in shape.tensors if tensor.part != "head")
    return replace(shape, tensors=(*body, ParamTensor("score.weight", (1, shape.hidden), "head")))


@cache
def part_of(name: str) -> Part:
    """Return the part of a parameter by its name in a model file."""
    words = {
        "lora": ("lora_",),
        "projector": ("multi_modal_projector", "merger", "connector", "mm_projector"),
        "vision": ("vision", "visual"),
        "head": ("lm_head", "score.", "embed_out"),
        "embedding": ("embed_tokens", "wte", "wpe", "embeddings", "embed_in"),
        "layers": ("layers.", ".h.", "blocks.", "layer."),
    }
    found = next((part for part, marks in words.items() if any(mark in name for mark in marks)), "other")
    return found  # type: ignore[return-value]


def read_properties(config: RunConfig) -> TaskProperties:
    """Return the properties of a recipe's task. Imports no torch; of a user's task file, its own imports."""
    task = make_task(config)
    if not task.is_planned or task.loads_own_model:
        return TaskProperties(is_known=False)
    inputs, judge = task.loss_inputs, make_judge(task)
    if judge is not None:
        judge.check_files()
    online = [scorer.config for scorer in inputs.scorers if not scorer.is_cached]
    return TaskProperties(
        rows_per_sample=2 if task.has_pairs else 1,
        is_scored=task.model_source is None or not task.model_source.can_generate,
        heads=task.export.modules_to_save,
        reference=inputs.reference.kind,
        reference_model=inputs.reference.config if inputs.reference.recipe_key else None,
        reward_models=(*online, *([] if judge is None else [judge.task.recipe.model])),
        packs_batches=task.packs_batches,
        disables_dropout=task.disables_dropout,
        images_per_row=getattr(task, "max_pages", 1),
        page_dpi=getattr(task, "dpi", None),
    )


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
        pixels_per_token=int(given["patch_size"]) ** 2 * merge,
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


def _named(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Tensors:
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
"""Model type -> its family. tests/unit/planner/test_read_shape.py compares each with transformers' model on the meta device."""
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
    own = (config.get("vision_config") or {}).get("model_type")
    family = VISION_FAMILIES.get(str(own or {"llava": "clip_vision_model"}.get(model_type, model_type)))
    if decoder is None or family is None:
        return None
    vision, tower = family(config.get("vision_config") or {}, config)
    tensors = (*tower, *PROJECTORS[model_type](vision, decoder.hidden, config), *decoder.tensors)
    return replace(decoder, model_type=model_type, text_type=text["model_type"], tensors=tensors, vision=vision)


def _decoder(config: Mapping[str, Any], prefix: str) -> ModelShape | None:
    """Return the shape of a decoder with Llama's layers; None for another family."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    values = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    shape = ModelShape(
        model_type=str(config["model_type"]),
        text_type=str(config["model_type"]),
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
    return replace(shape, tensors=_named(_decoder_tensors(shape, biases, prefix)))


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
    inner = find("intermediate_size n_inner ffn_dim d_ff d_inner", 4 * hidden)
    if experts := find("num_experts_per_tok num_experts_per_token moe_topk moe_top_k", 0):
        expert = find("moe_intermediate_size expert_ffn_hidden_size", inner)
        inner = (experts + find("n_shared_experts num_shared_experts", 0)) * expert
        inner += find("shared_expert_intermediate_size", 0)
    heads = find("num_attention_heads n_head n_heads num_heads", 12)
    model_type = str(config.get("model_type"))
    has_own_text_type = text is not config or "vision_config" not in config
    return ModelShape(
        model_type=model_type,
        text_type=str(text.get("model_type") or model_type) if has_own_text_type else f"{model_type}_text",
        hidden=hidden,
        intermediate=inner,
        experts_per_token=experts,
        layers=find("num_hidden_layers n_layer n_layers num_layers", 12),
        heads=heads,
        kv_heads=find("num_key_value_heads num_kv_heads", heads),
        head_dim=find("head_dim", hidden // max(heads, 1)),
        vocab=find("vocab_size", 1),
        tied=bool(config.get("tie_word_embeddings", True)),
        tensors=(),
    )


SHAPES_FILE = Path(__file__).parent / "shapes.json"
META_MODULE = "dstrain.training.list_parameters"
"""Module that a subprocess runs: it builds the model on the meta device and prints its parameters as JSON."""
META_TIMEOUT_SECONDS = 300
MetaParameters = Iterable[tuple[str, Sequence[int], bool]]
"""(name, size, whether it is trained) of every parameter of a model."""
ListBase = Callable[[ModelConfig], MetaParameters]
HUB_SUFFIXES = ("-Instruct", "-Chat", "-Base", "-it")
"""Of Hub ids that have the shape of the model without it."""


@cache
def _shipped() -> dict[str, Any]:
    """Return `shapes`: name -> its ids on the Hub and its config; `suggested`: kind of model -> names and ids, the largest first."""
    values: dict[str, Any] = parse_json(SHAPES_FILE.read_bytes())
    return values


def shape_names() -> list[str]:
    """Return the names of the shipped shapes."""
    return sorted(_shipped()["shapes"])


def named_config(name: str) -> dict[str, Any]:
    """Return the transformers config of a shipped shape. Raises UsageError."""
    if name not in shape_names():
        raise UsageError(f"--model-shape {name}: there is no such shape; {suggest_name(name, shape_names())}")
    return deepcopy(dict(_shipped()["shapes"][name]["config"]))


def suggested_models(kind: Literal["text", "vision"]) -> Mapping[str, str]:
    """Return name of a shipped shape -> id on the Hub of the models that a starter recipe may name, the largest first."""
    found: dict[str, str] = _shipped()["suggested"][kind]
    return found


def read_shape(config: RunConfig, list_base: ListBase | None = None) -> ModelShape:
    """Return the shape of the model that a recipe trains: with its task and the head of it, adapters, frozen parameters.

    `list_base` lists the parameters of a base, with its adapters, in this process, which has imported torch; without it
    a subprocess does, and this process imports no torch. Raises RecipeError where the model cannot be read.
    """
    properties = read_properties(config)
    if not properties.is_known:
        return _with_meta_parameters(ModelShape(**_UNKNOWN_SIZES, task=properties), _list_in_subprocess(config))
    shape, lora = read_base_shape(config.model), config.model.lora
    # peft decides which experts get adapters, by the family.
    if shape is None or (lora is not None and any(".experts." in one.name for one in shape.tensors)):
        rows = list_base(config.model) if list_base else _list_in_subprocess(config, "--base")
        sizes = _with_meta_parameters(generic_shape(_read_config(config.model) or {}), rows)
        has_qk_norm = any(".q_norm." in tensor.name for tensor in sizes.tensors)
        shape = replace(sizes, tied=not sizes.count("head"), has_qk_norm=has_qk_norm)
    if properties.is_scored:
        shape = with_score_head(shape)
    if lora is not None and not shape.count("lora"):
        shape = with_adapters(shape, lora, properties.heads)
    return replace(with_frozen(shape, config.model.freeze), task=properties)


_UNKNOWN_SIZES: dict[str, Any] = {
    "model_type": "", "hidden": 0, "intermediate": 0, "layers": 0, "heads": 1, "kv_heads": 1, "head_dim": 0, "vocab": 1, "tied": True, "tensors": (),
}  # fmt: skip


def read_base_shape(model: ModelConfig) -> ModelShape | None:
    """Return the shape of a model without its task's head and adapters; None where only the meta device can tell.

    Raises RecipeError for a folder whose config or weight files cannot be read.
    """
    values = _read_config(model)
    if values is None:
        return None
    key = "model.config" if model.config is not None else "model.path"
    if fault := quantized_fault(values, key) or wrong_size_fault(values, key):
        raise RecipeError(fault)
    try:
        shape, sizes_of_others = shape_from_config(values), generic_shape(values)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
        problem = f"has sizes in its config that make no model ({error})"
        raise RecipeError(Fault(key, problem, "correct them: whole numbers above 0")) from None
    if shape is not None or model.path is None or find_quantization(values):  # the headers describe quantized values
        return shape
    sizes = _read_headers(Path(resolve_base_model(model).path or "").expanduser())
    return (
        replace(sizes_of_others, tensors=_named(sizes.items()), param_source="safetensors headers") if sizes else None
    )


def _read_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the config of a model: the recipe's, a folder's, the Hub cache's or a shipped shape's; None without any."""
    if model.config is not None:
        return model.config
    base = resolve_base_model(model)
    name = base.path
    if name is None:
        problem, fix = "is not set, nor is model.config", "set model.path, or pass --model-shape NAME to plan"
        raise RecipeError(Fault("model.path", problem, fix))
    if (values := read_folder_config(name, "model.path")) is not None:
        return values
    file = _find_cached_config(name, base.revision)
    return _find_hub_shape(name) if file is None else read_json_object(file, "model.path")


def _find_cached_config(name: str, revision: str | None) -> Path | None:
    """Return config.json of a Hub id's revision in the Hub's cache; the newest one of a cache without main."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    place = hub / f"models--{name.replace('/', '--')}"
    ref = place / "refs" / (revision or "main")
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or "*"
    found = [*place.glob(f"snapshots/{commit}/config.json")] if name.count("/") == 1 else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _find_hub_shape(name: str) -> dict[str, Any] | None:
    """Return the shipped config of a Hub id such as meta-llama/Llama-3.1-8B-Instruct."""
    plain = next((name.removesuffix(suffix) for suffix in HUB_SUFFIXES if name.endswith(suffix)), name)
    shapes = _shipped()["shapes"].items()
    known = (shape for shape, values in shapes if plain.lower() in (hub.lower() for hub in values["hub"]))
    return next((named_config(shape) for shape in known), None)


MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file that its library reads."""


def _read_headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> size of every tensor in a folder's safetensors files, by their headers; empty without such files."""
    sizes: dict[str, tuple[int, ...]] = {}
    for file in find_weight_files(folder, "model.path") if folder.is_dir() else []:
        if file.suffix != ".safetensors":
            return {}
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if length > os.fstat(opened.fileno()).st_size:
                    raise ValueError(f"its header names {length} bytes")
                header = parse_json(opened.read(length), MAX_HEADER_BYTES)
            sizes |= {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise RecipeError(Fault("model.path", f"{file} cannot be read ({error})", "download it again")) from None
    return sizes


def _with_meta_parameters(shape: ModelShape, rows: MetaParameters) -> ModelShape:
    """Return the shape with the parameters of a model on the meta device."""
    tensors = tuple(ParamTensor(name, tuple(size), part_of(name), trained) for name, size, trained in rows)
    return replace(shape, tensors=tensors, param_source="meta device")


def _list_in_subprocess(config: RunConfig, *options: str) -> MetaParameters:
    """Return the parameters of a recipe's model, which a subprocess builds on the meta device. Raises RecipeError."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", META_MODULE, *options], input=dump_recipe(config), capture_output=True, text=True,
            timeout=META_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problem = f"building the model on the meta device takes over {META_TIMEOUT_SECONDS} s"
        raise RecipeError(Fault("model", problem, "name a preset in ds_config")) from None
    try:
        return [(str(name), [*size], bool(trained)) for name, size, trained in parse_json(done.stdout.splitlines()[-1])]
    except (LookupError, ValueError, TypeError):  # it failed, or a library ended the process with code 0
        reason = (done.stderr.strip().splitlines() or [f"no output, exit code {done.returncode}"])[-1]
        fix = "correct the recipe, or pass --model-shape NAME to plan"
        problem = f"its parameters cannot be counted ({reason.removeprefix('error: ')})"
        raise RecipeError(Fault("model", problem, fix)) from None


def reference_shape(policy: ModelShape) -> ModelShape | None:
    """Return the shape of a reference that is a model in memory, all frozen; None without one."""
    if policy.task.reference != "model":
        return None
    base = read_base_shape(policy.task.reference_model) if policy.task.reference_model is not None else None
    chosen = base or policy
    kept = (tensor for tensor in chosen.tensors if tensor.part != "lora")
    return replace(chosen, tensors=tuple(replace(tensor, is_trainable=False) for tensor in kept))


def describe_counts(shape: ModelShape) -> Mapping[str, int]:
    """Return part -> parameters, and `trained`."""
    parts = dict.fromkeys(tensor.part for tensor in shape.tensors)
    return {**{part: shape.count(part) for part in parts}, "trained": shape.count(trainable=True)}
