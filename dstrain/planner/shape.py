"""Shape of a model: its parameter tensors by part, and the sizes that its activations depend on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from math import prod
from typing import Any, Literal

from dstrain.errors import Fault, RecipeError

Part = Literal["embedding", "layers", "head", "vision", "projector", "lora", "other"]
PARTS: tuple[Part, ...] = ("embedding", "layers", "head", "vision", "projector", "lora", "other")


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
        return prod(self.shape)

    @property
    def is_linear_weight(self) -> bool:
        """Return True for a matrix of a linear layer inside the layers, vision tower or projector."""
        return len(self.shape) == 2 and self.part in ("layers", "vision", "projector") and "embed" not in self.name


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
    is_gated: bool = False
    """True for an MLP with a gate (Qwen2.5-VL)."""
    stored_layers: int = 0
    """Layers that run; LLaVA leaves the last one out, whose weights exist."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """Sizes of a decoder, with or without a vision encoder, and all its parameters. Compared by identity."""

    model_type: str
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
    has_qk_norm: bool = False
    norms_per_layer: int = 2
    has_softcap: bool = False
    """True where attention caps its logits, which only the eager implementation does."""
    vision: VisionShape | None = None
    param_source: str = "config"
    """config, safetensors headers, or meta device."""

    @property
    def has_fp32_norms(self) -> bool:
        """Return True where norms multiply with their weight in fp32, as Gemma's do."""
        return self.model_type.startswith("gemma")

    @cached_property
    def kinds(self) -> tuple[tuple[ParamTensor, int], ...]:
        """One tensor of each size, part and role, and how many there are: sums over 80 equal layers need one of them."""
        found: dict[tuple[Any, ...], tuple[ParamTensor, int]] = {}
        for tensor in self.tensors:
            key = tensor.shape, tensor.part, tensor.is_trainable, tensor.is_linear_weight
            first, count = found.get(key, (tensor, 0))
            found[key] = first, count + 1
        return tuple(found.values())

    def count(self, part: Part | None = None, trainable: bool | None = None) -> int:
        """Return the number of parameters of a part (None: all), trainable or frozen ones (None: both)."""
        return sum(
            tensor.numel * count
            for tensor, count in self.kinds
            if part in (None, tensor.part) and trainable in (None, tensor.is_trainable)
        )

    def largest(self, trainable: bool | None = None) -> int:
        """Return the number of values of the largest tensor, trainable or frozen (None: any)."""
        return max((tensor.numel for tensor, _ in self.kinds if trainable in (None, tensor.is_trainable)), default=0)


def with_adapters(shape: ModelShape, lora: Any, heads: Iterable[str] = ()) -> ModelShape:
    """Return the shape with LoRA adapters on its linear layers; all but them and `heads` is frozen.

    A weight of (out, in) gets A (rank, in) and B (out, rank); DoRA adds a magnitude (out,). `lora`: the recipe's
    LoraConfig. Hu et al., arXiv 2106.09685, section 4.1; Liu et al., arXiv 2402.09353, eq. 5.
    """
    adapters, kept = [], []
    for tensor in shape.tensors:
        module = tensor.name.rpartition(".")[0]
        is_head = any(module.endswith(head) for head in heads)
        kept.append(replace(tensor, is_trainable=is_head))
        if not tensor.is_linear_weight or is_head or not _is_target(module, lora.targets):
            continue
        rows, columns = tensor.shape
        parts: list[tuple[str, tuple[int, ...]]] = [("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank))]
        parts += [("lora_magnitude_vector", (rows,))] if lora.dora else []
        adapters += [ParamTensor(f"{module}.{name}.weight", size, "lora") for name, size in parts]
    return replace(shape, tensors=(*kept, *adapters))


def _is_target(module: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):  # a regular expression of the whole name, as peft reads it
        try:
            return targets == "all-linear" or re.fullmatch(targets, module) is not None
        except re.error as error:
            problem = f"{targets!r} is not a regular expression ({error})"
            raise RecipeError(Fault("model.lora.targets", problem, "correct it, or write a list of names")) from None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def with_frozen(shape: ModelShape, patterns: Iterable[str]) -> ModelShape:
    """Return the shape with the parameters of `model.freeze` frozen: names, prefixes, globs, or components."""
    patterns = tuple(patterns)

    def is_frozen(tensor: ParamTensor) -> bool:
        component = tensor.part if tensor.part in ("vision", "projector") else "language"
        names = (tensor.name, tensor.name.removeprefix("model."))
        return any(
            (pattern == component and shape.vision is not None)
            or any(name == pattern or name.startswith(f"{pattern}.") or fnmatch(name, pattern) for name in names)
            for pattern in patterns
        )  # fmt: skip

    return replace(
        shape,
        tensors=tuple(replace(tensor, is_trainable=False) if is_frozen(tensor) else tensor for tensor in shape.tensors),
    )


def with_score_head(shape: ModelShape) -> ModelShape:
    """Return the shape of a reward model: a linear score of one value instead of the language-model head."""
    body = tuple(tensor for tensor in shape.tensors if tensor.part != "head")
    return replace(shape, tensors=(*body, ParamTensor("score.weight", (1, shape.hidden), "head")))


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


def from_tensors(shapes: Mapping[str, tuple[int, ...]], shape: ModelShape, param_source: str) -> ModelShape:
    """Return the shape with tensors counted by name, in place of those derived from the config."""
    tensors = tuple(ParamTensor(name, size, part_of(name)) for name, size in shapes.items())
    return replace(shape, tensors=tensors, param_source=param_source)
