"""Dispatch modes that give the results of kernels which do nothing.

Device memory is host memory, so that an operation's result can be computed by torch's CPU kernel over the same bytes.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from emulated_attention import (
    Options,
    attend,
    attend_backward,
    attend_packed,
    attend_packed_backward,
    make_bias,
)
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
new_empty, new_empty_strided = torch.empty, torch.empty_strided
"""Of torch itself: inside `zero.Init` DeepSpeed replaces the functions by those of the device."""

SHAPE_FROM_DATA = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.masked_scatter_backward.default,
    # cuSOLVER, which is not emulated:
    aten._linalg_svd.default,
    aten._linalg_eigh.default,
    aten.linalg_qr.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten.linalg_inv_ex.default,
}
"""Operations that are computed on the host alone: the shape of their results depends on values, or no library runs them."""
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""Operations that look for the places of truth values first, if an index is made of them."""
EXACT = {torch.int32, torch.int64, torch.bool}
"""Types of tensors that decide the shapes of others."""
WITHOUT_VALUES = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
    "record_stream",
    "detach",
    "alias",
    "lift_fresh",
    "view",
    "_unsafe_view",
    "_reshape_alias",
    "split_with_sizes",
    "_pin_memory",
}
"""Operations that make or name memory and compute nothing."""
FP32_ONLY = {"native_layer_norm", "native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm"}
"""Operations whose CPU kernels return other types than CUDA's where inputs are of 16 bits."""


def install() -> None:
    """Enter the mode that EMU_VALUES asks for, for the rest of the process."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    values = os.environ.get("EMU_VALUES")
    if values == "1":
        flex_attention = importlib.import_module("torch.nn.attention.flex_attention")
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
        _print_host_values()
        Values().__enter__()
    elif values == "2":
        FiniteValues().__enter__()


def _print_host_values() -> None:
    """Let torch print tensors by their values on the host: it leaves all modes while it formats them."""
    module = importlib.import_module("torch._tensor_str")
    format_tensor = module._tensor_str

    def format_on_host(tensor: Tensor, indent: int) -> str:
        return format_tensor(as_host_tensor(tensor), indent)

    module._tensor_str = format_on_host


def as_host_tensor(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the same bytes as a tensor on an emulated device."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return new_empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    buffer = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    bytes_of_storage = torch.frombuffer(buffer, dtype=torch.uint8)
    result = new_empty(0, dtype=tensor.dtype)
    result.set_(bytes_of_storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return result.conj() if tensor.is_conj() else result


def as_host_argument(value: Any) -> Any:
    """Return an argument for the CPU: tensors over the same bytes, the device cpu, the CPU's own generator."""
    if isinstance(value, Tensor):
        return as_host_tensor(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "cuda":
        return None
    return value


def as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def short_name(func: OpOverload) -> str:
    """Return the name without its namespace."""
    return func._schema.name.split("::")[1]


def name_arguments(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by the names of the schema, defaults too."""
    named = {}
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            named[argument.name] = args[index]
        else:
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
    return named


# ---- attention: arguments (on the host, by name) -> values of the first outputs


def _options(named: dict[str, Any]) -> Options:
    window = named.get("window_size") or (named.get("window_size_left"), named.get("window_size_right"))
    left, right = (-1 if size is None else int(size) for size in window)
    return Options(bool(named["is_causal"]), named["scale"], left, right)


def _sdpa_bias(named: dict[str, Any]) -> Tensor | None:
    bias = named.get("attn_bias")
    if not named["is_causal"]:
        return bias
    queries, keys = named["query"].shape[-2], named["key"].shape[-2]
    causal = make_bias(queries, keys, Options(causal=True), align_bottom=False)
    return causal if bias is None else bias.float() + causal


def _sdpa(named: dict[str, Any]) -> Sequence[Tensor]:
    """Only the outputs: the backward pass here needs no sums, whose shapes differ between kernels."""
    return attend(named["query"], named["key"], named["value"], _sdpa_bias(named), named["scale"])[:1]


def _sdpa_backward(named: dict[str, Any]) -> Sequence[Tensor]:
    grad = named["grad_out"] if "grad_out" in named else named["grad_out_"]
    return attend_backward(grad, named["query"], named["key"], named["value"], _sdpa_bias(named), named["scale"])


def _cumulative(named: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    first = named["cum_seq_q"] if "cum_seq_q" in named else named["cu_seq_q"]
    second = named["cum_seq_k"] if "cum_seq_k" in named else named["cu_seq_k"]
    return first, first if second is None else second


def _batch_ends(tensor: Tensor) -> Tensor:
    batch, rows = tensor.shape[:2]
    return torch.arange(batch + 1) * rows


def _flash(named: dict[str, Any]) -> Sequence[Tensor]:
    """(tokens, heads, width) with the ends of sequences, or (batch, rows, heads, width) without."""
    q, k, v = named["query"], named["key"], named["value"]
    ends_q, ends_k = _cumulative(named)
    if ends_q is not None and ends_k is not None:
        return [attend_packed(q, k, v, ends_q, ends_k, _options(named))]
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    output = attend_packed(*flat, _batch_ends(q), _batch_ends(k), _options(named))
    return [output.unflatten(0, q.shape[:2])]


def _flash_backward(named: dict[str, Any]) -> Sequence[Tensor]:
    grad, q, k, v = named["grad_out"], named["query"], named["key"], named["value"]
    ends_q, ends_k = _cumulative(named)
    if ends_q is not None and ends_k is not None:
        return attend_packed_backward(grad, q, k, v, ends_q, ends_k, _options(named))
    flat = [tensor.flatten(0, 1) for tensor in (grad, q, k, v)]
    grads = attend_packed_backward(*flat, _batch_ends(q), _batch_ends(k), _options(named))
    return [part.unflatten(0, tensor.shape[:2]) for part, tensor in zip(grads, (q, k, v), strict=True)]


ATTENTION: dict[str, Callable[[dict[str, Any]], Sequence[Tensor]]] = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_scaled_dot_product_efficient_attention": _sdpa,
    "_scaled_dot_product_efficient_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_varlen_attn": _flash,
    "_varlen_attn_backward": _flash_backward,
}


# ---- operations that torch's CPU kernels compute in another way, or not at all


def _compute(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what the CPU kernel gives for arguments on the host."""
    if func is aten.log_sigmoid_forward.default:
        return (func(*args, **kwargs)[0],)  # the second output, a buffer, has another shape
    if func is aten.log_sigmoid_backward.default:
        return args[0] * torch.sigmoid(-args[1].float()).to(args[0].dtype)
    if func is aten.histc.default:  # of integers there is none on a CPU
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    if func is aten._fused_rms_norm_backward.default:
        return _rms_norm_backward(*args)
    if short_name(func) in FP32_ONLY:
        return func(*tree_map(as_fp32, args), **kwargs)
    return func(*args, **kwargs)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of input and weight."""
    axes = list(range(-len(normalized_shape), 0))
    normalized = x.float() * rstd
    grad = grad.float()
    scaled = grad if weight is None else grad * weight.float()
    grad_x = rstd * (scaled - normalized * (scaled * normalized).mean(axes, keepdim=True))
    if weight is None:
        return grad_x, None
    return grad_x, (grad * normalized).reshape(-1, *normalized_shape).sum(0)


def _needs_host(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether the result is made on the host and then copied to the device."""
    if func in SHAPE_FROM_DATA or short_name(func) == "int8_vectorwise_quant":
        return True
    if func not in INDEXING:
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _returns_view(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the result is a view: `to`, `reshape` and `contiguous` return a copy where there can be none."""
    if short_name(func) not in ("to", "reshape", "contiguous"):
        return True
    result = func(*args, **kwargs)
    return bool(result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())


def _writes(func: OpOverload) -> bool:
    """Return whether the operation writes into one of its arguments."""
    return any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)


def _run_flex_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of FlexAttention by its plain implementation, whose operations the mode computes."""
    flex = importlib.import_module("torch._higher_order_ops.flex_attention")  # its package has an operator of that name
    plain = {flex.flex_attention: flex.sdpa_dense, flex.flex_attention_backward: flex.sdpa_dense_backward}
    return plain.get(func, func)(*args, **kwargs)


class Values(TorchDispatchMode):
    """Computes each operation on an emulated device with torch's CPU kernels."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.not_computed: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            return func(*args, **kwargs)  # make_fx records operations, whose values nobody reads
        if not isinstance(func, OpOverload):
            with self:
                return _run_flex_attention(func, args, kwargs)
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        device = kwargs.get("device")
        on_device = any(tensor.is_cuda for tensor in tensors)
        makes_on_device = device is not None and torch.device(device).type == "cuda"
        of_subclass = any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        if of_subclass or not (on_device or makes_on_device):
            return func(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.is_pinned.default):
            return func(*args, **kwargs)
        if func.is_view and _returns_view(func, args, kwargs):
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "bitsandbytes", "torch_attn"):
            if func.namespace not in ("c10d", "_c10d_functional"):
                self._tell(func, "it is not one of torch's own")
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # a default device of the program is not for the tensors made here
            return self._compute_on_device(func, args, kwargs, tensors)

    def _compute_on_device(self, func: OpOverload, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        host_args, host_kwargs = tree_map(as_host_argument, (args, kwargs))
        if _needs_host(func, args):
            device = next(tensor.device for tensor in tensors if tensor.is_cuda)
            result = func(*host_args, **host_kwargs)
            if _writes(func):
                return args[0]
            return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, result)
        output = func(*args, **kwargs)
        name = short_name(func)
        if name in WITHOUT_VALUES:
            return output
        try:
            if name in ATTENTION:
                result = ATTENTION[name](name_arguments(func, host_args, host_kwargs))
            else:
                result = _compute(func, host_args, host_kwargs)
        except Exception as error:
            self._tell(func, str(error)[:200])
            return output
        if not any(isinstance(value, Tensor) for value in tree_flatten(output)[0]):
            return result  # a number or a truth value, as of torch.equal
        if not _writes(func):  # else the CPU kernel has written into the same bytes
            self._copy(func, output, result)
        return output

    def _copy(self, func: OpOverload, output: Any, result: Any) -> None:
        """Copy the values of a result into the tensors that the device's kernel has left as they were."""
        for target, value in zip(tree_flatten(output)[0], tree_flatten(result)[0], strict=False):
            if not isinstance(target, Tensor) or not isinstance(value, Tensor):
                continue
            if target.shape == value.shape:
                as_host_tensor(target).copy_(value)
            elif target.is_cuda and target.numel():
                self._tell(func, f"the shapes differ: {tuple(target.shape)} on CUDA, {tuple(value.shape)} on the CPU")

    def _tell(self, func: OpOverload, reason: str) -> None:
        """Say once that the results of an operation are undefined."""
        if func._schema.name not in self.not_computed:
            self.not_computed.add(func._schema.name)
            print(f"cuda emulator: no values of {func}: {reason}", file=sys.stderr, flush=True)


class FiniteValues(Values):
    """Computes small tensors of integers and truth values alone, which decide shapes, windows and positions.

    What the host reads of other tensors is finite: 1 for numbers, 0 for bytes, False for truth values that no
    comparison of integers gave.
    """

    LARGEST = 1 << 22
    """Values of the largest tensor that is computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._is_all_true.default and args[0].is_cuda:
            return torch.ones((), dtype=torch.bool)  # models ask it of masks
        if self._is_small_and_exact(func, args, kwargs):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if isinstance(result, Tensor) and result.dtype is torch.bool:
                result.is_computed = True  # of integers, as labels are compared with the vocabulary
            return result
        if func is aten.masked_scatter_backward.default and args[0].is_cuda:
            return new_empty(args[2], dtype=args[0].dtype, device=args[0].device)
        if func in INDEXING and args[0].is_cuda:
            args = (args[0], _replace_masks(args[1]), *args[2:])
        output = func(*args, **kwargs)
        if func is aten._local_scalar_dense.default and args[0].is_cuda:
            if isinstance(output, bool):
                return output and hasattr(args[0], "is_computed")
            if args[0].dtype is torch.uint8:
                return 0  # DeepSpeed reads an overflow as a byte, and would leave out the update
            return 1.0 if isinstance(output, float) else output
        to_host = func is aten._to_copy.default and args[0].is_cuda and output.device.type == "cpu"
        if to_host and output.is_floating_point() and output.numel() < 10_000:
            output.fill_(1.0)
        return output

    def _is_small_and_exact(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        dtypes = {tensor.dtype for tensor in tensors}
        if not tensors:
            dtypes = {kwargs.get("dtype")}
        if dtypes == {torch.bool} and func not in SHAPE_FROM_DATA:
            return False  # they may be those of a comparison of numbers, which was not computed
        return dtypes <= EXACT and all(tensor.numel() <= self.LARGEST for tensor in tensors)


def _replace_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the indices of an operation with the places that masks select instead of the masks, (places,) each."""
    replaced: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.is_cuda and index.dtype is torch.bool:
            replaced += as_host_tensor(index).nonzero().to(index.device).unbind(1)
        else:
            replaced.append(index)
    return replaced
