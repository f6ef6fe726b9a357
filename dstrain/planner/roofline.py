"""Operations, bytes and launches of a forward and backward pass, and the speed that a GPU's peaks allow. Imports no torch.

The roofline model (Williams et al., doi 10.1145/1498765.1498785): a pass takes at least its operations divided by the
peak rate of matrix products, and at least the bytes that it moves divided by the bandwidth of memory. Both are computed,
neither is measured: the result is an upper bound of the speed of passes. The optimizer's update, exchanges between
processes and copies to the host are not in it.

Operations are those of matrix products. A weight has one product in the forward pass, one for the gradient of its input
where anything before it is trained, and one for its own gradient where it is trained; 2 operations for each value and
position (Chowdhery et al., arXiv 2204.02311, appendix B). The two products of attention become four in the backward
pass. What is computed twice to save memory is counted apart: recomputed layers, one product of fused attention (Dao et
al., arXiv 2205.14135, algorithm 4), and logits whose errors are not kept.

Bytes: each operation reads its inputs from the memory of the device once, and writes its outputs once; nothing stays in
a cache between two operations. A product of T positions with a weight of (out, in) moves T in, T out and in out values.
Attention is one kernel, which moves queries, keys, values, output and their gradients. Norms, rotary embeddings, gated
MLPs and residuals are the operations of transformers' modules, or the kernels of liger-kernel; the functions below give
their counts. A trained weight's gradient is read and written once more, for ZeRO's bucket or the sum over passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dstrain.planner.gpu_peaks import GpuPeaks, find_peaks
from dstrain.planner.lines import LayerGraph, PlanInputs, layer_index
from dstrain.planner.shapes import ModelShape, ParamTensor, VisionShape, part_of, reference_shape
from dstrain.planner.workload import Workload, mean_block_keys
from dstrain.units import format_count

LAUNCH_SECONDS = 5e-6
"""Time of the host for each kernel, copy or memset that it launches.

NVIDIA's "Getting Started with CUDA Graphs" (developer blog, 2019) has 3.8 us for each short kernel of a loop in C++,
without the time that Python and torch's dispatcher take.
"""


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """What a forward and backward pass of one process computes and moves."""

    tokens: int
    flops: float
    """Operations that the mathematics of the pass needs."""
    recomputed_flops: float
    """Operations that are done once more to save memory."""
    moved_bytes: float
    """Bytes read and written in the memory of the device."""

    @property
    def flops_per_token(self) -> float:
        """Return the operations per token, without recomputation."""
        return self.flops / self.tokens

    @property
    def bytes_per_token(self) -> float:
        """Return the moved bytes per token."""
        return self.moved_bytes / self.tokens

    @property
    def intensity(self) -> float:
        """Return the operations for each byte, with recomputation."""
        return (self.flops + self.recomputed_flops) / self.moved_bytes


class Bound(NamedTuple):
    """Upper bound of the speed of one process on a GPU."""

    tokens_per_second: float
    by: str
    """What takes longest: products, memory or launches."""


def bound_speed(cost: PassCost, peaks: GpuPeaks, launches: int | None = None) -> Bound:
    """Return the tokens per second that the peaks of a GPU allow. `launches`: of a pass, where they are known."""
    seconds = {
        "products": (cost.flops + cost.recomputed_flops) / (peaks.tflops * 1e12),
        "memory": cost.moved_bytes / (peaks.gb_per_second * 1e9),
        "launches": (launches or 0) * LAUNCH_SECONDS,
    }
    slowest = max(seconds, key=lambda name: seconds[name])
    return Bound(cost.tokens / seconds[slowest], slowest)


def compute_cost(run: PlanInputs) -> PassCost | None:
    """Return the cost of a forward and backward pass, and of the reference's forward pass.

    None for families outside the planner's tables, whose layers are not known well enough. Online reward models and
    DoRA's norms are not counted.
    """
    runs = [run, *_reference_runs(run)]
    if any(each.shape.param_source != "config" for each in runs) or not run.workload.tokens:
        return None
    costs = [_pass_cost(each) for each in runs]
    return PassCost(
        tokens=run.workload.tokens,
        flops=sum(cost.flops for cost in costs),
        recomputed_flops=sum(cost.recomputed_flops for cost in costs),
        moved_bytes=sum(cost.moved_bytes for cost in costs),
    )


def _reference_runs(run: PlanInputs) -> Iterator[PlanInputs]:
    """Yield the forward pass of a frozen reference that is computed in each pass: a model, or the policy without adapters."""
    if run.shape.task.reference not in ("model", "adapter"):
        return
    shape = reference_shape(run.shape) or _freeze(run.shape)
    yield replace(run, shape=shape, workload=replace(run.workload, checkpointed=0.0))


def _freeze(shape: ModelShape) -> ModelShape:
    base = (tensor for tensor in shape.tensors if tensor.part != "lora")
    return replace(shape, tensors=tuple(replace(tensor, is_trainable=False) for tensor in base))


def _pass_cost(run: PlanInputs) -> PassCost:
    flops = recomputed_flops = moved_bytes = 0.0
    for product in _list_products(run):
        operations = 2 * product.rows * product.outputs * product.inputs
        flops += operations * product.products
        recomputed_flops += operations * product.recomputed
        moved_bytes += _product_bytes(run, product)
    for graph, is_recomputed in zip(run.layers, run.recomputed, strict=True):
        attention = _attention_product(run)
        again = is_recomputed and graph.is_recorded
        flops += attention * (2 + 4 * graph.is_recorded)
        recomputed_flops += attention * (2 * again + (graph.is_recorded and not run.workload.is_eager))
        forward, backward = _layer_bytes(run, graph)
        moved_bytes += (forward * (1 + again) + backward * graph.is_recorded) * run.workload.tokens
    vision = run.vision
    if vision is not None and not vision.is_gated:  # the windows of Qwen2.5-VL are small, and not counted
        attention = 2 * run.positions * vision.hidden * vision.patches * vision.layers
        trains = "vision" in run.trained_parts
        flops += attention * (2 + 4 * trains)
        recomputed_flops += attention * trains * (2 * run.workload.checkpointed + 1)
    gradients = 2 * run.width * run.trained
    moved_bytes += _adapter_bytes(run) + _encoder_bytes(run) + _ends_bytes(run) + gradients
    return PassCost(tokens=run.workload.tokens, flops=flops, recomputed_flops=recomputed_flops, moved_bytes=moved_bytes)


class _Product(NamedTuple):
    """Products of a weight (outputs, inputs) with some rows."""

    rows: float
    outputs: int
    inputs: int
    products: int
    """Products of the forward pass and of gradients."""
    recomputed: float = 0
    dequantized: float = 0
    """How often the weight is dequantized before a product."""


def _product_bytes(run: PlanInputs, product: _Product) -> float:
    """Return the bytes of a weight's products; a dequantized weight is written in the run's precision first."""
    values = product.outputs * product.inputs
    moved = product.rows * (product.outputs + product.inputs) + values
    codes = 0.5 if run.quantize == "nf4" else 1
    return run.width * moved * (product.products + product.recomputed) + product.dequantized * values * (
        run.width + codes
    )


def _list_products(run: PlanInputs) -> Iterator[_Product]:
    """Yield the products of all weights of a pass."""
    workload, vision = run.workload, run.vision
    image_tokens = 0 if vision is None else workload.image_tokens or vision.tokens * workload.images
    for tensor in run.shape.tensors:
        part, index = part_of(tensor.name.replace(".lora_", ".")), layer_index(tensor.name)
        if len(tensor.shape) < 2:
            continue
        if part == "layers" and index is not None:
            yield _layer_product(run, tensor, index)
        elif part == "projector" and vision is not None:
            outputs, inputs = tensor.shape
            count = 1 + ("vision" in run.trained_parts) + tensor.is_trainable
            yield _Product(image_tokens, outputs, inputs, count)
        elif part == "vision" and vision is not None and "position" not in tensor.name:
            yield from _encoder_products(run, vision, tensor, index)
    if run.has_head:
        recomputed = int(run.recomputes_errors)
        is_recorded = "projector" in run.trained_parts or any(graph.is_recorded for graph in run.layers)
        count = 1 + is_recorded + (run.head_numel > 0)
        yield _Product(workload.targets, run.shape.vocab, run.shape.hidden, count, recomputed)


def _layer_product(run: PlanInputs, tensor: ParamTensor, index: int) -> _Product:
    graph, is_recomputed = run.layers[index], run.recomputed[index]
    needs_input = graph.norms_trained or not _reads_layer_input(tensor)
    has_input_gradient = graph.input_needs_grad or (graph.is_recorded and needs_input)
    recomputed = int(is_recomputed and graph.is_recorded)
    dequantized = (1 + has_input_gradient + recomputed) * run.is_quantized(tensor)
    outputs, inputs = tensor.shape
    count = 1 + has_input_gradient + tensor.is_trainable
    return _Product(run.workload.tokens, outputs, inputs, count, recomputed, dequantized)


def _reads_layer_input(tensor: ParamTensor) -> bool:
    """Return True for a weight of queries, keys and values: the first layer's need no gradient of a frozen input."""
    return any(f".{name}." in tensor.name for name in ("q_proj", "k_proj", "v_proj", "qkv")) and (
        ".lora_B" not in tensor.name
    )


def _encoder_products(
    run: PlanInputs, vision: VisionShape, tensor: ParamTensor, index: int | None
) -> Iterator[_Product]:
    outputs, inputs = tensor.shape[0], tensor.numel // tensor.shape[0]
    if index is None:  # the embedding of patches, which CLIP's token of the class does not pass
        patches = run.positions if vision.is_gated else vision.tokens * run.workload.images
        yield _Product(patches, outputs, inputs, 1 + tensor.is_trainable)
    elif index < vision.layers:  # LLaVA leaves the last one out
        is_trained = "vision" in run.trained_parts
        has_trained_weights = run.shape.count("vision", trainable=True) > 0  # of the model, not of adapters
        needs_input = index > 0 or has_trained_weights or not _reads_layer_input(tensor)
        has_input_gradient = is_trained and needs_input
        count = 1 + has_input_gradient + tensor.is_trainable
        yield _Product(run.positions, outputs, inputs, count, is_trained * run.workload.checkpointed)


def mean_keys(workload: Workload) -> float:
    """Return the keys that attention computes for a query on average: half of a row with a causal kernel."""
    if workload.keys is not None:
        return workload.keys
    if workload.is_packed and workload.device == "cpu" and not workload.is_eager:
        return mean_block_keys(workload.length)
    if workload.has_mask or workload.is_eager:
        return workload.length
    return (workload.length + 1) / 2


def _attention_product(run: PlanInputs) -> float:
    """Return the operations of one of attention's products in a layer: logits, or their sum of values."""
    return 2 * run.workload.tokens * run.shape.heads * run.shape.head_dim * mean_keys(run.workload)


# In what follows (forward, backward) are bytes per value of a token, w bytes of a value.


def _norm_bytes(run: PlanInputs, is_trained: bool) -> tuple[float, float]:
    """Return the bytes of an RMSNorm.

    By transformers: x to fp32 and back, a square, its mean, and products with 1 / rms and with the weight; 13 operations
    in the backward pass. By liger-kernel: x and y; x and the gradients of y and x.
    """
    width = run.width
    if run.has_fused_kernels:
        return 2 * width, 3 * width
    casts = 2 * (width + 4) if width == 2 else 0
    scaled = 4 if run.shape.has_fp32_norms else width
    return 20 + 2 * scaled + casts, 68 + 2 * scaled + casts + 4 * scaled * is_trained


def _layer_bytes(run: PlanInputs, graph: LayerGraph) -> tuple[float, float]:
    """Return the bytes per token of a decoder layer besides its products: norms, RoPE, attention, MLP, residuals."""
    shape, width, is_fused = run.shape, run.width, run.has_fused_kernels
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm_forward, norm_backward = _norm_bytes(run, graph.norms_trained)
    forward: float
    backward: float
    # Two sums, and those of the gradients of both ways around attention and MLP; q, k and v have one input, and so have
    # gate and up.
    forward, backward = 2 * 3 * width * shape.hidden, (2 + 3) * 3 * width * shape.hidden
    if is_fused:  # the second norm reads and writes the sum: two values more in each pass instead of three and three
        forward -= width * shape.hidden
        backward -= 2 * width * shape.hidden
    forward += shape.norms_per_layer * norm_forward * shape.hidden
    backward += shape.norms_per_layer * norm_backward * shape.hidden
    if shape.has_qk_norm:
        forward += norm_forward * (wide + narrow)
        backward += norm_backward * (wide + narrow)
    # x cos + rotated x sin: two products, a negation, a concatenation, a sum. Fused: a copy, and a kernel in place.
    forward += (4 if is_fused else 10) * width * (wide + narrow)
    backward += (2 if is_fused else 14) * width * (wide + narrow)
    forward += width * (2 * wide + 2 * narrow)
    backward += width * (4 * wide + 4 * narrow)
    # act(gate) up: the activation, and a product. Fused: one kernel.
    forward += (3 if is_fused else 5) * width * shape.intermediate
    backward += (5 if is_fused else 9) * width * shape.intermediate
    return forward, backward


def _adapter_bytes(run: PlanInputs) -> float:
    """Return the bytes of adapters besides their products: a scaled output that is added to the layer's, and sums of the
    gradients of their inputs."""
    moved_bytes = 0.0
    for tensor in run.shape.tensors:
        part, index = part_of(tensor.name.replace(".lora_", ".")), layer_index(tensor.name)
        if tensor.part != "lora" or part not in ("layers", "vision") or index is None:
            continue
        rows = run.workload.tokens if part == "layers" else run.positions
        again = run.recomputed[index] if part == "layers" else run.workload.checkpointed
        if ".lora_A" in tensor.name:
            moved_bytes += rows * run.width * 3 * tensor.shape[1]
        elif ".lora_B" in tensor.name:
            moved_bytes += rows * run.width * (5 * (1 + again) + 2) * tensor.shape[0]
    return moved_bytes


def _encoder_bytes(run: PlanInputs) -> float:
    """Return the bytes of a vision encoder besides its products, in all of its layers."""
    vision, width = run.vision, run.width
    if vision is None:
        return 0
    hidden, inner = vision.hidden, vision.intermediate
    forward: float
    backward: float
    # Attention as in the decoder, and the sums of residuals and of gradients.
    forward, backward = (4 + 6) * width * hidden, (8 + 15) * width * hidden
    if vision.is_gated:
        norm_forward, norm_backward = _norm_bytes(run, "vision" in run.trained_parts)
        forward += 2 * norm_forward * hidden + (3 if run.has_fused_kernels else 5) * width * inner
        backward += 2 * norm_backward * hidden + (5 if run.has_fused_kernels else 9) * width * inner
        forward += (4 if run.has_fused_kernels else 10) * width * 2 * hidden
        backward += (2 if run.has_fused_kernels else 14) * width * 2 * hidden
    else:
        # torch's LayerNorm is one kernel; CLIP's x sigmoid(1.702 x) is three.
        forward += 2 * 2 * width * hidden + 7 * width * inner
        backward += 2 * 3 * width * hidden + 11 * width * inner
    is_trained = "vision" in run.trained_parts
    passes = forward * (1 + is_trained * run.workload.checkpointed) + backward * is_trained
    return passes * run.positions * vision.layers


def _ends_bytes(run: PlanInputs) -> float:
    """Return the bytes of the embedding, the last norm and the logits."""
    shape, width, workload = run.shape, run.width, run.workload
    is_recorded = any(graph.is_recorded for graph in run.layers)
    is_norm_trained = any(tensor.is_trainable and tensor.name.endswith(".norm.weight") for tensor in shape.tensors)
    norm_forward, norm_backward = _norm_bytes(run, is_norm_trained)
    moved = workload.tokens * shape.hidden * (2 * width + norm_forward + norm_backward * is_recorded)
    if run.embedding_numel:  # a gradient of the whole table is written, and that of each token added
        moved += width * (run.embedding_numel + 3 * workload.tokens * shape.hidden)
    if run.has_head:
        # Logits to fp32, their exponentials, and errors in the run's precision. Fused: logits twice, and errors.
        moved += workload.targets * shape.vocab * (3 * width if run.has_fused_kernels else 16 + 2 * width)
    return moved


COMMON_GPUS = ("H100", "A100-SXM4-80GB", "RTX 4090", "T4")
"""GPUs whose bounds are told where the run's GPU is not known."""
KERNELS = {"none": False, "liger": True}
"""Values of `model.kernels` -> whether kernels are fused."""


def compute_roofline(run: PlanInputs, gpus: Sequence[str]) -> dict[str, Any] | None:
    """Return operations, bytes and bounds with each value of `model.kernels` as JSON values; None as in `compute_cost`.

    `gpus`: names of devices; one whose peaks are not known has no bounds, and in fp32 none has.
    """
    costs = {name: compute_cost(replace(run, has_fused_kernels=is_fused)) for name, is_fused in KERNELS.items()}
    known = {name: cost for name, cost in costs.items() if cost is not None}
    if not known:
        return None
    bounds: dict[str, dict[str, Any]] = {}
    for gpu in gpus if run.is_16_bit else ():
        peaks = find_peaks(gpu)
        if peaks is not None:
            bounds[gpu] = {name: bound_speed(cost, peaks)._asdict() for name, cost in known.items()}
    eager = known["none"]
    return {
        "kernels": "liger" if run.has_fused_kernels else "none",
        "flops_per_token": eager.flops_per_token,
        "recomputed_flops_per_token": eager.recomputed_flops / eager.tokens,
        "bytes_per_token": {name: cost.bytes_per_token for name, cost in known.items()},
        "bounds": bounds,
    }


def describe_roofline(values: Mapping[str, Any] | None, gpu_name: str | None = None) -> str:
    """Return `compute_roofline` in two lines. `gpu_name`: of the run's GPU, where it is known."""
    if values is None:
        return "FLOPs and bytes per token: not computed for this family of models"
    moved = values["bytes_per_token"]
    per_token = (
        f"per token, computed: {format_count(values['flops_per_token'])} FLOPs and "
        f"{format_count(values['recomputed_flops_per_token'])} recomputed; {format_count(moved['none'])} bytes moved in "
        f"memory, {format_count(moved['liger'])} with fused kernels"
    )
    speeds = []
    for gpu, by_kernels in values["bounds"].items():
        bound = by_kernels[values["kernels"]]
        speeds.append(f"{gpu} {format_count(bound['tokens_per_second'])} (bound by {bound['by']})")
    unknown = f"the peaks of {gpu_name} are not known" if gpu_name else "peaks are published for 16 bits"
    bounds = ", ".join(speeds) or f"unknown: {unknown}"
    return f"{per_token}\nmost tokens/s of a process by published peaks, kernels: {values['kernels']}: {bounds}"
