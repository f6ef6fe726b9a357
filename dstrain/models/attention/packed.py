"""Attention of packed rows: which kernel runs, and the one of variable lengths."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch

from dstrain.batch import Batch
from dstrain.models.attention.by_group import Heads, attention_by_group
from dstrain.models.attention.layer_kinds import read_layer_kinds
from dstrain.models.attention.layout import AttentionSettings, PackedLayout, VarlenTensors
from dstrain.models.attention.model_types import family_unsupported_reason
from dstrain.models.attention.recurrent import enable_packed_recurrence
from dstrain.models.attention.sequence import heads_for_tokens, share_decoder_inputs, tokens_for_heads
from dstrain.models.params import unwrap_peft

# Shapes: T tokens of the packed row, K keys if each branch has a copy of its prefix, H heads, G key-value heads, D width.


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What kernels accept or do not accept in a call."""

    device_type: str
    dtype: torch.dtype
    width: int
    """Of a head of query and key."""
    value_width: int
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None on a CPU."""
    settings: AttentionSettings

    @classmethod
    def of(cls, heads: Heads, settings: AttentionSettings) -> Self:
        """Return the call with these tensors: query (1, H, T, D), key and value (1, G, T, D)."""
        query, _, value = heads
        is_on_gpu = query.device.type == "cuda"
        return cls(
            device_type=query.device.type, dtype=query.dtype, width=query.shape[-1], value_width=value.shape[-1],
            capability=torch.cuda.get_device_capability(query.device) if is_on_gpu else None, settings=settings,
        )  # fmt: skip


VARLEN_MAX_WIDTH, VARLEN_CAPABILITY = 256, (8, 0)
"""Greatest width of a head of torch's flash kernels, and the compute capability from which they run."""
FLEX_MIN_WIDTH, FLEX_CAPABILITY = 16, (7, 0)
"""Least width of a head that FlexAttention compiles (torch/_inductor/kernel/flex/flex_attention.py), and the compute
capability from which Triton compiles for a GPU (torch/_inductor/scheduler.py)."""


def accepts_varlen(call: AttentionCall) -> bool:
    """Return True where torch's varlen kernel can compute this call."""
    settings = call.settings
    return (
        call.capability is not None
        and call.capability >= VARLEN_CAPABILITY
        and call.dtype in (torch.float16, torch.bfloat16)
        and call.width == call.value_width
        and call.width <= VARLEN_MAX_WIDTH
        and call.width % 8 == 0
        and not (settings.dropout or settings.needs_logits)
        and load_varlen_attn() is not None
    )


def accepts_flex(call: AttentionCall) -> bool:
    """Return True where FlexAttention, compiled by Triton, can compute this call and its gradients."""
    return (
        call.capability is not None
        and call.capability >= FLEX_CAPABILITY
        and call.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and min(call.width, call.value_width) >= FLEX_MIN_WIDTH
        and not call.settings.dropout
        and (call.settings.sinks is None or _has_flex_aux())
    )


@cache
def _has_flex_aux() -> bool:
    """Return True where FlexAttention returns the sums that sinks need: from torch 2.9 on."""
    from torch.nn.attention import flex_attention

    return hasattr(flex_attention, "AuxRequest")


@cache
def load_varlen_attn() -> Callable[..., torch.Tensor] | None:
    """Return torch's varlen_attn, or None where torch is older than its windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return (
        varlen_attn if {"window_size", "enable_gqa", "scale"} <= {*inspect.signature(varlen_attn).parameters} else None
    )


def packed_varlen_attention(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D), by torch's varlen_attn.

    Each branch gets a copy of its prefix's keys and values; the causal mask is aligned at the last query and key, so
    that windows count logical positions. FlashAttention-2: Dao (arXiv 2307.08691).
    """
    varlen_attn = load_varlen_attn()
    assert varlen_attn is not None, "accepts_varlen"
    query, keys, tensors = _gather(heads, layout)
    # Never (-1, -1), with which torch may take cuDNN, whose causal mask is aligned at the first query and key.
    window = (-1, 0) if settings.window is None else (settings.window - 1, 0)
    out = varlen_attn(
        query[0], *(one[0] for one in keys), tensors.cu_queries, tensors.cu_keys, tensors.max_queries, tensors.max_keys,
        scale=settings.scale, window_size=window, enable_gqa=query.shape[2] != keys[0].shape[2],
    )  # fmt: skip
    return out.unsqueeze(0)


def packed_flash_attention(
    base: Callable[..., Any], module: torch.nn.Module, heads: Heads, layout: PackedLayout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D), by transformers' function of a flash package or kernel.

    `kwargs`: those of the layer. Positions are left out, since transformers would search them for sequences.
    """
    query, keys, tensors = _gather(heads, layout)
    kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
    kwargs |= {"cu_seq_lens_q": tensors.cu_queries, "cu_seq_lens_k": tensors.cu_keys}
    kwargs |= {"max_length_q": tensors.max_queries, "max_length_k": tensors.max_keys}
    query, key, value = (one.transpose(1, 2) for one in (query, *keys))
    out: torch.Tensor = base(module, query, key, value, None, **kwargs)[0]
    return out


def _gather(heads: Heads, layout: PackedLayout) -> tuple[torch.Tensor, list[torch.Tensor], VarlenTensors]:
    """Return query (1, T, H, D), key and value (1, K, G, D), and the kernel's index tensors."""
    query, *keys = (one.transpose(1, 2) for one in heads)
    tensors = layout.varlen_tensors(query.device)
    if tensors.key_index is not None:
        keys = [one.index_select(1, tensors.key_index) for one in keys]
    return query, keys, tensors


# Shapes: T tokens of the packed row, H heads, G key-value heads, D width of a head.


EAGER = "packed_eager"
"""Name of the attention function for models with `eager`, which transformers does not look up by name."""


def packing_unsupported_reason(config: Any, shares_prefixes: bool) -> str | None:
    """Return why a model of this config cannot take packed batches, or None.

    `shares_prefixes`: groups have prefixes. All families that take packed batches take prefixes too.
    """
    if (reason := family_unsupported_reason(config)) is not None:
        return reason
    name = getattr(config.get_text_config(), "_attn_implementation", None) or "sdpa"
    if name not in ("sdpa", "eager", EAGER, "flex_attention") and "flash" not in name:
        return f"the attention implementation {name} is not known to take packed batches"
    return None


def enable_packed_attention(model: torch.nn.Module) -> None:
    """Let the model's attention and recurrent layers take the arguments of `packed_model_kwargs`. Idempotent.

    The attention function of the model's implementation is registered again under its own name, with a function that
    calls the original for batches that are not packed. So the config, its name for masks and exports stay as they are.
    `eager` functions belong to a model's file: such models get a registered name, EAGER, that finds them there.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for part in _attention_models(model):
        name = part.config._attn_implementation or "eager"
        if name == "eager":
            AttentionInterface.register(EAGER, PackedAttention("eager", _run_eager_attention))
            AttentionMaskInterface.register(EAGER, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
            part.set_attn_implementation(EAGER)
        elif not isinstance(ALL_ATTENTION_FUNCTIONS[name], PackedAttention):
            AttentionInterface.register(name, PackedAttention(name, ALL_ATTENTION_FUNCTIONS[name]))
        kinds = read_layer_kinds(part.config.model_type)
        if kinds.recurrent:
            enable_packed_recurrence(part, kinds)
        if kinds.without_arguments:
            _hand_on_groups(part, kinds.without_arguments)
        has_layers = isinstance(getattr(part, "layers", None), torch.nn.ModuleList)  # a text model without a head
        if has_layers and share_decoder_inputs not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(share_decoder_inputs, with_kwargs=True)


def _hand_on_groups(model: torch.nn.Module, class_names: Collection[str]) -> None:
    """Let modules of these classes get the groups of the module that calls them. Idempotent.

    A layer that is recomputed gets its arguments again, so that the groups are those of its pass.
    """
    for owner in [*model.modules()]:
        for child in owner.children():
            has_hook = any(isinstance(hook, _GroupsOfOwner) for hook in child._forward_pre_hooks.values())
            if type(child).__name__ in class_names and not has_hook:
                hook = _GroupsOfOwner()
                owner.register_forward_pre_hook(hook.keep, with_kwargs=True)
                child.register_forward_pre_hook(hook, with_kwargs=True)


class _GroupsOfOwner:
    """Forward pre-hook of a module that does not get the arguments of the module around it."""

    def __init__(self) -> None:
        self.layout: PackedLayout | None = None

    def keep(self, owner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the module around it."""
        self.layout = kwargs.get("packed_groups")

    def __call__(
        self, child: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs if self.layout is None else {**kwargs, "packed_groups": self.layout}


def has_packed_attention(model: torch.nn.Module) -> bool:
    """Return True after `enable_packed_attention(model)`; False for classes that are not part of transformers.

    The names of attention functions are those of all models in the process, and code that came with the weights may
    not hand the groups on.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parts = [*_attention_models(model)]
    return bool(parts) and all(
        type(part).__module__.startswith("transformers.")
        and isinstance(ALL_ATTENTION_FUNCTIONS.get(part.config._attn_implementation), PackedAttention)
        for part in parts
    )


def packed_model_kwargs(batch: Batch) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward pass for a packed batch, besides `input_ids`.

    Layers hand `packed_groups` on to the attention function, so that it survives gradient checkpointing.
    """
    positions = batch.tensors["position_ids"]
    # transformers returns a 4D mask as it is: no (T, T) mask, and no sequences guessed from jumps in the positions.
    placeholder = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=positions.device)
    layout = PackedLayout(batch.groups, batch.sequence)
    return {"position_ids": positions, "attention_mask": placeholder, "packed_groups": layout}


class PackedAttention:
    """An attention function of transformers' interface that also takes packed batches."""

    def __init__(self, name: str, base: Callable[..., Any]) -> None:
        self.name, self.base = name, base

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Return the attention (1, T, H, D) of query (1, H, T, D), key and value (1, G, T, D), and no weights.

        Layers that are not causal, those of a vision tower, read images and not the packed row: some models (Qwen2-VL)
        hand all their arguments on to the tower. Raises ValueError for other heads of another shape.
        """
        layout = kwargs.pop("packed_groups", None)
        if layout is None or not getattr(module, "is_causal", True):
            found: tuple[torch.Tensor, torch.Tensor | None] = self.base(module, query, key, value, *args, **kwargs)
            return found
        heads, sequence = (query, key, value), layout.sequence
        tokens = layout.tokens if sequence is None else layout.tokens // sequence.size
        if query.shape[0] != 1 or query.shape[2] != tokens:
            shape = f"{query.shape[0]} rows of {query.shape[2]} tokens"
            raise ValueError(f"{type(module).__name__} attends to {shape}, but the packed groups have {tokens}")
        if sequence is not None:
            heads = heads_for_tokens(query, key, value, sequence)
            if kwargs.get("s_aux") is not None:  # gpt-oss: a logit for each head
                kwargs["s_aux"] = kwargs["s_aux"][slice(*sequence.part(query.shape[1]))]
        out = self._attend(module, heads, layout, kwargs)
        return (out if sequence is None else tokens_for_heads(out, sequence)), None

    def _attend(
        self, module: torch.nn.Module, heads: Heads, layout: PackedLayout, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the attention of the whole row, (1, T, H, D), for the heads of this process."""
        if "flash" in self.name:
            return packed_flash_attention(self.base, module, heads, layout, kwargs)
        settings = AttentionSettings.from_kwargs(kwargs, is_eager=self.name == "eager")
        return choose_kernel(self.name, AttentionCall.of(heads, settings))(heads, settings, layout)


Kernel = Callable[[Heads, AttentionSettings, PackedLayout], torch.Tensor]


def choose_kernel(name: str, call: AttentionCall) -> Kernel:
    """Return the function for a call of the attention implementation `name`: on a GPU, one that needs no masks.

    It is the first of the implementation's kernels that accepts the call. `attention_by_group` accepts all calls.
    """
    kernels: list[tuple[Kernel, Callable[[AttentionCall], bool]]] = []
    if name == "sdpa":
        kernels.append((packed_varlen_attention, accepts_varlen))
    if name in ("sdpa", "flex_attention") or call.settings.needs_logits:
        kernels.append((packed_flex_attention, accepts_flex))
    for kernel, accepts in kernels:
        if accepts(call):
            return kernel
    return attention_by_group


def compiles_attention(config: Any, name: str, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return True where packed batches of a model with this config are computed by Triton kernels on a GPU.

    `name`: the attention implementation, `auto` for transformers' own choice; `dtype`: that of the pass.
    """
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if getattr(text, "qk_nope_head_dim", None):  # multi-head latent attention of DeepSeek
        width = text.qk_nope_head_dim + text.qk_rope_head_dim
    call = AttentionCall(
        device_type="cuda", dtype=dtype, width=width, value_width=getattr(text, "v_head_dim", None) or width,
        capability=capability, settings=AttentionSettings(
            softcap=getattr(text, "attn_logit_softcapping", None),
            sinks=torch.zeros(1) if text.model_type == "gpt_oss" else None,
        ),
    )  # fmt: skip
    return choose_kernel("sdpa" if name == "auto" else name, call) is packed_flex_attention


def _run_eager_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the eager attention function of the model file that defines the module."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _attention_models(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the text models inside a model, with a head and without: the layers read the implementation from a config."""
    from transformers import PreTrainedModel

    core: Any = unwrap_peft(model)
    text_class = type(core.config.get_text_config())
    for part in core.modules():
        if isinstance(part, PreTrainedModel) and isinstance(part.config, text_class):  # not a vision tower
            yield part


def packed_flex_attention(heads: Heads, settings: AttentionSettings, layout: PackedLayout) -> torch.Tensor:
    """Return the attention of a packed row, (1, T, H, D). `heads`: query (1, H, T, D), key and value (1, G, T, D).

    FlexAttention: Dong et al. (arXiv 2412.05496). Compiled on a GPU. On a CPU it is not compiled, and computes all
    (T, T) logits: for tests only. It has no dropout.
    """
    query, key, value = heads
    block_mask = layout.cached(
        ("flex", settings.window, query.device), lambda: _block_mask(layout, settings.window, query.device)
    )
    attend = partial(
        _flex_attention(query.device.type), query, key, value,
        score_mod=None if settings.softcap is None else _softcap(settings.softcap), block_mask=block_mask,
        scale=settings.scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    out: torch.Tensor
    if settings.sinks is None:
        out = attend()
    else:
        from torch.nn.attention.flex_attention import AuxRequest  # from torch 2.9 on

        out, aux = attend(return_aux=AuxRequest(lse=True))
        # A sink adds exp(sink) to the denominator: out * exp(lse) / (exp(lse) + exp(sink)).
        share = torch.sigmoid(aux.lse - settings.sinks.to(aux.lse.dtype).view(1, -1, 1))  # (1, H, T)
        out = (out * share.unsqueeze(-1)).to(query.dtype)
    return out.transpose(1, 2)


@cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention, dynamic=True)


@cache
def _softcap(softcap: float) -> Callable[..., torch.Tensor]:
    # One function per value, since a new function would be compiled again.
    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _create_block_mask(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled on a GPU, where it would otherwise make a (T, T) mask.
    return create_block_mask if device_type == "cpu" else torch.compile(create_block_mask)


def _block_mask(layout: PackedLayout, window: int | None, device: torch.device) -> Any:
    group, branch, position = layout.index_tensors(device)

    def is_seen(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = (branch[query] == branch[key]) | (branch[key] == 0)
        distance = position[query] - position[key]
        seen = (group[query] == group[key]) & own & (distance >= 0)
        return seen if window is None else seen & (distance < window)

    count = len(group)
    return _create_block_mask(device.type)(is_seen, None, None, count, count, device=device)
