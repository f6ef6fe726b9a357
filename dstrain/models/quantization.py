"""Quantized linear layers and the library that holds them (bitsandbytes)."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Literal

from dstrain.errors import Fault, RecipeError
from dstrain.models.params import components_by_id, get_zero3_config, unwrap_peft
from dstrain.models.shard import Sharder
from dstrain.units import format_count

if TYPE_CHECKING:
    import torch


EXTRA = 'pip install "dstrain[quantize]"'

OPTIMIZERS_8BIT = ("adamw_8bit", "paged_adamw_8bit")
"""Values of optim.name that are bitsandbytes' optimizers."""
MAX_NUMEL_8BIT = 2**31
"""First size of a tensor that the kernels of these optimizers cannot take."""


def import_bitsandbytes(key: str) -> Any:
    """Return the module bitsandbytes. Raises RecipeError for the recipe's `key` where it cannot be imported."""
    check_bitsandbytes(key)
    try:
        with _without_hub_kernels():
            import bitsandbytes
    except Exception as error:  # a build for another CUDA version fails with many errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RecipeError(Fault(key, f"bitsandbytes cannot be imported ({reason})", "install it again")) from error
    functional = bitsandbytes.functional
    if not hasattr(functional.dequantize_4bit, "__wrapped__"):
        functional.dequantize_4bit = _in_one_row(functional.dequantize_4bit)
    return bitsandbytes


def _in_one_row(dequantize_4bit: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return bitsandbytes' function, which on a CPU dequantizes a weight as one row.

    bitsandbytes quantizes a weight as one sequence of blocks. Its CPU kernel (backends/cpu/ops.py of 0.50) begins a new
    block with each row: where a row is no multiple of a block, values get the scales of other blocks.
    """

    @wraps(dequantize_4bit)
    def dequantize(codes: torch.Tensor, quant_state: Any = None, *rest: Any, **options: Any) -> torch.Tensor:
        if quant_state is None or codes.device.type != "cpu" or quant_state.shape[-1] % quant_state.blocksize == 0:
            return dequantize_4bit(codes, quant_state, *rest, **options)
        shape = quant_state.shape
        row = copy(quant_state)
        row.shape = type(shape)([1, shape.numel()])
        return dequantize_4bit(codes, row, *rest, **options).view(shape)

    return dequantize


def check_bitsandbytes(key: str) -> None:
    """Raise RecipeError for the recipe's `key` where bitsandbytes is not installed. Imports nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(Fault(key, "needs bitsandbytes, which is not installed", f"run {EXTRA}"))


def preload_bitsandbytes() -> None:
    """Import bitsandbytes, if it can be, before peft does, which tries again: see `_without_hub_kernels`."""
    with suppress(RecipeError):
        import_bitsandbytes(QUANTIZE_KEY)


@contextmanager
def _without_hub_kernels() -> Iterator[None]:
    """Hide the package `kernels` inside.

    On a CPU with AVX512-BF16 bitsandbytes downloads a kernel from the Hub and runs it while it is imported
    (backends/cpu/ops.py of 0.50), and logs a warning where it cannot. Code from the Hub runs only if the recipe names it.
    """
    logger, hidden = logging.getLogger("bitsandbytes.backends.cpu.ops"), "kernels" not in sys.modules
    level = logger.level
    logger.setLevel(logging.ERROR)
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        yield
    finally:
        logger.setLevel(level)
        if hidden:
            del sys.modules["kernels"]


QUANTIZE_KEY = "model.quantize"
QuantizationKind = Literal["nf4", "int8"]
INT8_THRESHOLD = 6.0
"""Magnitude from which a column of activations is multiplied in 16 bits: section 3.2 of the paper of LLM.int8."""
_DEQUANTIZE = ContextVar("_DEQUANTIZE", default=False)


@dataclass(frozen=True)
class QuantizationSummary:
    """Linear layers of a model that were quantized."""

    kind: QuantizationKind
    num_layers: int
    num_parameters: int
    """Weights in these layers."""

    def __str__(self) -> str:
        return (
            f"quantized: {format_count(self.num_parameters)} weights of {self.num_layers} linear layers, in {self.kind}"
        )


@contextmanager
def dequantized_weights() -> Iterator[None]:
    """Let `quantize_model` write the dequantized values into the layers inside, instead of replacing the layers.

    The model then has the weights that a quantized one computes with, in its own dtype: adapters can be merged into
    them without a further rounding.
    """
    token = _DEQUANTIZE.set(True)
    try:
        yield
    finally:
        _DEQUANTIZE.reset(token)


def quantize_model(
    model: torch.nn.Module, kind: QuantizationKind, modules_to_save: Sequence[str] = ()
) -> QuantizationSummary:
    """Replace the linear layers of the model's body by quantized ones, in place, one at a time.

    `modules_to_save`: names of modules that are trained in full beside adapters, whose layers keep their dtype.

    nf4: NormalFloat4 with blocks of 64 and double quantization (Dettmers et al., arXiv 2305.14314, section 3); the
    matrix product runs in the dtype of its input. int8: LLM.int8 (Dettmers et al., arXiv 2208.07339). Embeddings,
    norms, heads, the vision tower, the projector and what the model's class names in `modules_to_not_convert` (the
    name of transformers' quantizers) keep their dtype. Layers are quantized on the process's device, and stay there.
    Raises RecipeError without bitsandbytes and without a linear layer.

    Under ZeRO-3, where the model is one of `built_on_rank_0`, each layer is sharded once it is quantized, and the other
    parameters at the end. Collective there.
    """
    bnb = import_bitsandbytes(QUANTIZE_KEY)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        problem = "the task builds its model in shards of ZeRO stage 3, and only whole layers can be quantized"
        raise RecipeError(Fault(QUANTIZE_KEY, problem, "load it with ModelSource.load, or use ds_config: zero2"))
    found = list(_find_linear_layers(model, modules_to_save))
    if not found:
        fix = "leave model.quantize out; layers of other classes are not quantized"
        raise RecipeError(Fault(QUANTIZE_KEY, "the model has no linear layer that could be quantized", fix))
    num_layers, num_parameters = len(found), sum(layer.weight.numel() for _, _, layer in found)
    sharder = None if get_zero3_config() is None else Sharder(model)
    found.reverse()  # layers are taken from the end, in the order of most files
    while found:
        parent, name, layer = found.pop()  # not kept in the list: its memory is free before the next one is quantized
        quantized = _quantize_layer(bnb, layer, kind, sharder)
        if _DEQUANTIZE.get():
            layer.weight.data = _dequantize(bnb, quantized).to("cpu", layer.weight.dtype)
        else:
            setattr(parent, name, quantized)
        del layer, quantized
    if sharder is not None:
        sharder.shard_rest()
    if not _DEQUANTIZE.get():
        # peft chooses the class of an adapter by these.
        setattr(model, {"nf4": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}[kind], True)
    return QuantizationSummary(kind, num_layers, num_parameters)


CHANGED_BYTES = {
    "zero_quantized_weights": "weights are sent in 8 bits",
    "zero_quantized_nontrainable_weights": "frozen weights are stored in 8 bits",
    "stage3_use_all_reduce_for_fetch_params": "weights are gathered by sums",
}
"""Keys of zero_optimization with which the weights gathered at stage 3 are not those that were sharded, bit by bit."""


def find_zero3_fault(kind: QuantizationKind, preset: str, zero: Mapping[str, Any]) -> Fault | None:
    """Return the fault of quantized weights at ZeRO stage 3, if there is one. `zero`: the block zero_optimization."""
    if kind == "int8":
        problem = f"{preset} is of ZeRO stage 3, which shards weights of 4 bits and none of 8 bits"
        return Fault(QUANTIZE_KEY, problem, "write nf4, or use ds_config: zero2, where each GPU holds all weights")
    for key, effect in CHANGED_BYTES.items():
        if zero.get(key):
            problem = f"is {kind}, but {preset} has zero_optimization.{key}: {effect}, which changes 4-bit codes"
            return Fault(QUANTIZE_KEY, problem, f"remove {key} from the DeepSpeed JSON, or leave quantize out")
    return None


def _process_device() -> str:
    """Return the GPU that this process has chosen; the CPU, which is slow, for one that has not."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"


def _find_linear_layers(
    model: Any, modules_to_save: Sequence[str]
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Yield (parent, name in it, layer) of the linear layers in the model's body, without vision and projector."""
    import torch

    core = unwrap_peft(model)
    body, components = getattr(core, "base_model", core), components_by_id(model)
    head = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
    kept, names = {id(head)}, {*modules_to_save, *getattr(core, "modules_to_not_convert", ())}
    for name, module in core.named_modules():
        if name.rpartition(".")[2] in names:
            kept.update(id(part) for part in module.modules())
    for parent in body.modules():
        for name, layer in parent.named_children():
            is_linear = type(layer) is torch.nn.Linear and id(layer) not in kept
            if is_linear and components.get(id(layer.weight)) not in ("vision", "projector"):
                yield parent, name, layer


def _quantize_layer(bnb: Any, layer: torch.nn.Linear, kind: QuantizationKind, sharder: Sharder | None) -> Any:
    import torch

    device = _process_device()
    sizes = layer.in_features, layer.out_features, layer.bias is not None
    nn = bnb.nn
    with torch.device("meta"):  # no memory for weights that are replaced
        if kind == "nf4":
            quantized = _nf4_class(bnb)(*sizes, compress_statistics=True, quant_type="nf4")
        else:
            quantized = _int8_class(nn.Linear8bitLt)(*sizes, has_fp16_weights=False, threshold=INT8_THRESHOLD)
    weight = layer.weight.detach() if sharder is None else sharder.place(layer.weight)
    if kind == "nf4":
        weight_class = _params4bit_class(bnb)
        quantized.weight = weight_class(weight, requires_grad=False, quant_type="nf4", module=quantized).to(device)
        # Read by peft: no dtype of its own.
        quantized.compute_dtype, quantized.compute_type_is_set = None, True
        if sharder is not None:
            _shard_layer(quantized, sharder)
    else:
        quantized.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
    if layer.bias is not None:
        quantized.bias = layer.bias
        quantized.bias.requires_grad_(False)
    quantized.train(layer.training)
    return quantized


def _shard_layer(quantized: Any, sharder: Sharder) -> None:
    """Shard the codes of a 4-bit layer; each rank keeps all scales, 0.13 bits per weight.

    DeepSpeed wants all parameters in the run's dtype, and does not compute with frozen ones: the bytes of the codes are
    stored as values of that dtype.
    """
    import torch

    weight, dtype = quantized.weight, sharder.dtype
    state = weight.quant_state
    for scales in (state.absmax, state.offset, state.state2.absmax):
        sharder.broadcast(scales)
    codes = weight.data.flatten()
    padding = -codes.numel() % dtype.itemsize
    weight.data = torch.nn.functional.pad(codes, (0, padding)).view(dtype)[:, None]
    weight.quant_storage = quantized.quant_storage = dtype
    sharder.shard(weight)


@cache
def _params4bit_class(bnb: Any) -> Any:
    """Return bitsandbytes' 4-bit weight, whose `to` returns the weight itself where nothing changes, as torch's does.

    On a CPU, peft's DoRA puts the result of `to` into the layer in each forward pass (dequantize_module_weight in
    peft/utils/integrations.py of 0.21): a new parameter, which DeepSpeed has not sharded.
    """
    import torch

    class Params4bit(bnb.nn.Params4bit):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
            is_same = device in (None, self.device) and dtype in (None, self.dtype)
            return self if self.bnb_quantized and is_same else super().to(*args, **kwargs)

    return Params4bit


@cache
def _nf4_class(bnb: Any) -> Any:
    """Return bitsandbytes' 4-bit layer with a product that keeps no reference to the values of the weight.

    Its own keeps a view of them for the backward pass (MatMul4Bit in autograd/_functions.py of 0.50). Under ZeRO-3 the
    gathered weights of all layers would then stay in memory from the forward pass to the backward pass, which gathers
    them again. Its own layer also repacks the weights in evaluations on a CPU with AVX512-BF16, and computes in bf16
    from then on, in training too.
    """
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor, layer: Any) -> torch.Tensor:
            ctx.layer = layer
            bias = None if layer.bias is None else layer.bias.to(inputs.dtype)
            state = layer.weight.quant_state
            with torch.no_grad():
                if inputs.device.type == "cpu":  # see `_in_one_row`
                    weight = bnb.functional.dequantize_4bit(layer.codes, state)
                    return torch.nn.functional.linear(inputs, weight.to(inputs.dtype), bias)
                product: torch.Tensor = bnb.matmul_4bit(inputs, layer.codes, state, bias=bias)
            return product

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (gradient,), layer = gradients, ctx.layer
            weight = bnb.functional.dequantize_4bit(layer.codes, layer.weight.quant_state)
            return torch.matmul(gradient, weight.to(gradient.dtype)), None

    class Linear4bit(bnb.nn.Linear4bit):
        @property
        def codes(self) -> torch.Tensor:
            """Two codes in each byte, (bytes, 1), without the padding of a sharded weight."""
            numel = self.weight.quant_state.shape.numel()
            return self.weight.data.view(torch.uint8).reshape(-1, 1)[: (numel + 1) // 2]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = Product.apply(inputs, self)
            return product

    return Linear4bit


@cache
def _int8_class(base: Any) -> Any:
    """Return bitsandbytes' 8-bit layer, whose scales move with the module that contains it, and which keeps no input.

    Its own scales are attributes that only a call of the layer's `to` moves, not that of a module around it. Its own
    product keeps its input as an attribute of the graph, though no gradient needs it (MatMul8bitLt in
    autograd/_functions.py of 0.50): until the loss is gone, and with gradient checkpointing too, which recomputes only
    what autograd has saved.
    """
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor, layer: Any) -> torch.Tensor:
            ctx.layer, ctx.dtype = layer, inputs.dtype
            with torch.no_grad():
                product: torch.Tensor = base.forward(layer, inputs)
            return product

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (gradient,), state = gradients, ctx.layer.state
            weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
            return torch.matmul(gradient.to(ctx.dtype), weight), None

    class Int8Linear(base):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = Product.apply(inputs, self)
            return product

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            moved = super()._apply(fn, recurse)
            for holder in (self.weight, self.state):  # in `weight` before the first forward pass, in `state` after it
                if getattr(holder, "SCB", None) is not None:
                    holder.CB, holder.SCB = self.weight.data, holder.SCB.to(self.weight.device)
            return moved

    return Int8Linear


def _dequantize(bnb: Any, quantized: Any) -> torch.Tensor:
    """Return the weights of a quantized layer, as its forward pass uses them."""
    weight, functional = quantized.weight, bnb.functional
    if hasattr(weight, "quant_state"):
        found: torch.Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
        return found
    found = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return found
