"""Lines of a memory plan: model states, ZeRO-3 buffers, activations, each with formula and source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, Literal

from dstrain.models.gradient_checkpointing import choose_layers
from dstrain.planner.workload import ModelShape, ParamTensor, VisionShape, Workload, part_of

Place = Literal["gpu", "host", "nvme"]
Kind = Literal["state", "buffer", "activation", "reserve"]
When = Literal["always", "pass", "head", "layer", "step"]


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one process."""

    name: str
    num_bytes: int
    place: Place
    """`gpu` means the memory of the process's own device, on a CPU run its host memory."""
    kind: Kind
    formula: str
    source: str
    """Paper and equation, or file of DeepSpeed, torch or dstrain, from which the formula follows."""
    when: When = "always"
    """pass: during forward and backward passes; head, layer: only while the head, or one layer, is in its backward pass;
    step: while the optimizer updates the weights. The peak is `always` + max(`pass` + max(`head`, `layer`), `step`)."""


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of an optimizer's state per trained parameter, without the fp32 master weights."""

    per_param: float
    states: str
    """The tensors it keeps, for the formula of a plan."""
    source: str
    per_hidden_param: float | None = None
    """Of the hidden matrices, where they have another state."""
    is_factored: bool = False
    """True where a matrix of R rows and C columns keeps R + C values instead of `per_param` bytes per value."""


OPTIMIZERS: dict[str, OptimizerBytes] = {
    "adamw": OptimizerBytes(8, "two fp32 moments", "Kingma and Ba, arXiv 1412.6980, algorithm 1"),
    "sgd": OptimizerBytes(0, "no state", "torch.optim.SGD without momentum"),
    # Codes of 8 bits, and an fp32 scale of every 256.
    "adamw_8bit": OptimizerBytes(2 + 8 / 256, "two 8-bit moments", "Dettmers et al., arXiv 2110.02861, section 2"),
    "paged_adamw_8bit": OptimizerBytes(
        2 + 8 / 256, "two 8-bit moments; paged to the host where the GPU is full", "arXiv 2305.14314, section 3"
    ),
    "lion": OptimizerBytes(4, "one fp32 average", "Chen et al., arXiv 2302.06675, algorithm 2"),
    "muon": OptimizerBytes(
        8, "two fp32 moments; one momentum for hidden matrices", "DeepSpeed runtime/zero/muon", per_hidden_param=4
    ),
    "adafactor": OptimizerBytes(
        4, "row and column means of matrices", "Shazeer and Stern, arXiv 1804.04235, algorithm 4", is_factored=True
    ),
}
"""optim.name -> bytes of state."""


@dataclass(frozen=True)
class QuantizedBytes:
    """Bytes per value of a frozen linear weight that is stored in fewer bits, its constants included."""

    per_param: float
    source: str


QUANTIZED_WEIGHTS: dict[str, QuantizedBytes] = {
    # Blocks of 64 with an 8-bit constant each, and an fp32 constant of every 256 of these.
    "nf4": QuantizedBytes(0.5 + 1 / 64 + 4 / (64 * 256), "Dettmers et al., arXiv 2305.14314, section 3"),
    # One fp32 scale per row, which is less than 0.1 % of a matrix with 4096 columns.
    "int8": QuantizedBytes(1.0, "Dettmers et al., arXiv 2208.07339, section 2"),
}
"""model.quantize -> bytes of a quantized weight. Embeddings, norms, the head and adapters keep the run's precision."""


# In formulas: N processes, P parameters, T trained ones, w bytes of a weight, g bytes of an accumulated gradient.

ZERO_PAPER = "Rajbhandari et al., arXiv 1910.02054, section 5"


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """What weights, gradients and optimizer states depend on."""

    shape: ModelShape
    precision: str
    zero: Mapping[str, Any]
    """The block zero_optimization of the completed DeepSpeed JSON."""
    grad_bytes: int
    """Bytes of an accumulated gradient."""
    comm_bytes: int
    """Bytes of a gradient in the bucket of stage 3."""
    accumulate: int
    """Forward passes per step; any number above 1 where it varies."""
    world_size: int
    optimizer: str
    quantize: str | None = None
    device: str = "cuda"
    """cuda or cpu."""
    master_bytes: int = 4
    """Bytes of a master weight and of each value of the optimizer: 2 with bf16_master_weights_and_grads."""
    hidden_matrices: int = 0
    """Trained values that Muon updates."""

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return int(self.zero.get("stage", 0))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a weight in the run's precision."""
        return DTYPE_BYTES[self.precision]

    @property
    def trained(self) -> int:
        """Return the number of trained parameters."""
        return self.shape.count(trainable=True)

    @property
    def largest_trained(self) -> int:
        """Return the number of values of the largest trained tensor."""
        return self.shape.largest(trainable=True)

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Return True where DeepSpeed replaces ZeRO's optimizer: bf16 at stage 1, with sums in fp32."""
        return self.stage == 1 and self.precision == "bf16" and self.grad_bytes == 4

    def offload(self, name: str) -> str | None:
        """Return the device of offload_optimizer or offload_param: cpu, nvme or None."""
        device = (self.zero.get(name) or {}).get("device", "none")
        return None if device == "none" else str(device)

    def sharded(self, trainable: bool | None = None) -> int:
        """Return the values of one process's partitions at stage 3, where each tensor is padded to a multiple of N."""
        chosen = (one for one in self.shape.kinds if trainable in (None, one[0].is_trainable))
        return sum(ceil(tensor.numel / self.world_size) * count for tensor, count in chosen)


def make_line(
    name: str, count: tuple[float, float], place: Place, about: tuple[Kind, When], formula_and_source: tuple[str, str]
) -> MemoryLine:
    """Return a line of `count`: a number of values and the bytes of each."""
    return MemoryLine(name, round(count[0] * count[1]), place, about[0], *formula_and_source, when=about[1])


STATE: tuple[Kind, When] = ("state", "always")
BUFFER: tuple[Kind, When] = ("buffer", "always")
PASS: tuple[Kind, When] = ("buffer", "pass")
STEP: tuple[Kind, When] = ("buffer", "step")


def weight_bytes(settings: StateSettings, tensor: ParamTensor) -> float:
    """Return the bytes of one value of a tensor: those of its quantized form where it has one."""
    is_quantized = settings.quantize is not None and tensor.is_linear_weight and not tensor.is_trainable
    return QUANTIZED_WEIGHTS[str(settings.quantize)].per_param if is_quantized else settings.weight_bytes


def replicated_weights(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the weights by part, trained and frozen, where each process has all of them."""
    for trainable, word in ((True, "weights"), (False, "frozen weights")):
        chosen = [one for one in settings.shape.kinds if one[0].is_trainable == trainable]
        for part in dict.fromkeys(tensor.part for tensor, _ in chosen):
            own = [one for one in chosen if one[0].part == part]
            size = sum(tensor.numel * count * weight_bytes(settings, tensor) for tensor, count in own)
            yield make_line(f"{word}: {part}", (size, 1), "gpu", STATE, ("w P", f"{ZERO_PAPER}.1"))


def optimizer_line(settings: StateSettings, share: float, place: Place, source: str) -> MemoryLine:
    known, trained = OPTIMIZERS[settings.optimizer], settings.trained
    size = known.per_param * trained
    if known.per_hidden_param is not None:
        size -= (known.per_param - known.per_hidden_param) * settings.hidden_matrices
    if known.is_factored:
        chosen = [(tensor.shape, count) for tensor, count in settings.shape.kinds if tensor.is_trainable]
        size = known.per_param * sum(count * (sum(one) if len(one) > 1 else one[0]) for one, count in chosen)
    size *= settings.master_bytes / 4
    formula = f"{known.per_param * settings.master_bytes / 4:g} T{'' if share == 1 else ' / N'}: {known.states}"
    return make_line("optimizer states", (size * share, 1), place, STATE, (formula, f"{known.source}; {source}"))


STAGE_3 = "DeepSpeed runtime/zero/stage3.py"


def stage_3_lines(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the lines of one process."""
    trained = settings.sharded(True)
    optimizer, params = settings.offload("offload_optimizer"), settings.offload("offload_param")
    place = _place(optimizer)
    yield from _sharded_weights(settings, params)
    # Also in fp32: DeepSpeed compares a torch.device with a name, and so always copies the partition.
    yield make_line(
        "master weights", (trained, settings.master_bytes), place, STATE,
        ("4 T / N, 2 T / N in bf16", f"{STAGE_3}, fp32_partitioned_groups_flat"),
    )  # fmt: skip
    yield optimizer_line(settings, trained / max(settings.trained, 1), place, f"{ZERO_PAPER}.3")
    yield from _gradients(settings, optimizer)
    yield from _stage_3_buffers(settings, params)


def _gradients(settings: StateSettings, optimizer: str | None) -> Iterator[MemoryLine]:
    trained, group, width = settings.sharded(True), _largest_sub_group(settings), settings.master_bytes
    on_host: Place = "host" if optimizer else "gpu"
    sums = ("g T / N", f"{STAGE_3}, grad_partitions_flat_buffer")
    yield make_line("gradients", (trained, settings.grad_bytes), on_host, STATE, sums)
    if optimizer is None:
        own = ("4 x largest sub-group", f"{STAGE_3}, step")
        yield make_line("gradients of a sub-group", (group, width), "gpu", STEP, own)
        return
    source = f"{STAGE_3}, initialize_optimizer_states"
    yield make_line("gradients of the optimizer", (trained, width), _place(optimizer), STATE, ("4 T / N", source))
    if optimizer == "nvme":
        count = int(settings.zero["offload_optimizer"].get("buffer_count", 4))
        swap = (f"{count} (buffer_count) x 4 x largest sub-group", "DeepSpeed runtime/swap_tensor/optimizer_utils.py")
        yield make_line("swap buffers of the optimizer", (count * group, 4), "host", BUFFER, swap)


def _place(offload: str | None) -> Place:
    return "nvme" if offload == "nvme" else "host" if offload else "gpu"


def _largest_sub_group(settings: StateSettings) -> float:
    """Return the values of one process in the largest sub-group, which is closed by the tensor that exceeds its size."""
    largest = ceil(settings.largest_trained / settings.world_size)
    return min(settings.sharded(True), float(settings.zero.get("sub_group_size", 1e9)) + largest)


def _sharded_weights(settings: StateSettings, offload: str | None) -> Iterator[MemoryLine]:
    for trainable, word in ((True, "weights"), (False, "frozen weights")):
        chosen = [one for one in settings.shape.kinds if one[0].is_trainable == trainable]
        for part in dict.fromkeys(tensor.part for tensor, _ in chosen):
            own = [one for one in chosen if one[0].part == part]
            numbers = ((ceil(tensor.numel / settings.world_size) * count, tensor) for tensor, count in own)
            size = sum(number * weight_bytes(settings, tensor) for number, tensor in numbers)
            yield make_line(f"{word}: {part}", (size, 1), _place(offload), STATE, ("w P / N", f"{ZERO_PAPER}.3"))
    if offload == "nvme":
        block = settings.zero["offload_param"]
        count = float(block.get("buffer_count", 5)) * float(block.get("buffer_size", 1e8))
        yield make_line(
            "swap buffers of the weights", (count, settings.weight_bytes), "host", BUFFER,
            ("buffer_count x buffer_size x w", "DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py"),
        )  # fmt: skip


def _stage_3_buffers(settings: StateSettings, offload: str | None) -> Iterator[MemoryLine]:
    zero, shape, width = settings.zero, settings.shape, settings.weight_bytes
    threshold = float(zero.get("stage3_param_persistence_threshold", 1e5))
    small = sum(tensor.numel * count for tensor, count in shape.kinds if tensor.numel <= threshold)
    total = shape.count()
    # Else the gathered weight is the partition itself.
    is_copied = settings.world_size > 1 or (offload is not None and settings.device == "cuda")
    if is_copied:
        yield make_line(
            "small weights kept whole", (small, width), "gpu", BUFFER,
            ("w x tensors up to stage3_param_persistence_threshold", f"{STAGE_3}, persistent_parameters"),
        )  # fmt: skip
        limit = float(zero.get("stage3_max_live_parameters", 1e9))
        # A module's own weights are gathered whatever the limit is.
        live = min(total - small, max(limit, shape.largest() + float(zero.get("stage3_prefetch_bucket_size", 5e7))))
        yield make_line(
            "gathered weights", (max(live, 0), width), "gpu", PASS,
            ("w x min(P, max(stage3_max_live_parameters, largest tensor + prefetch))",
             "DeepSpeed runtime/zero/partitioned_param_coordinator.py"),
        )  # fmt: skip
    if (group := int(zero.get("zero_hpz_partition_size", 1))) > 1:
        yield make_line(
            "secondary partition of the weights", (total / group, width), "gpu", BUFFER,
            ("w P / zero_hpz_partition_size", "Wang et al., arXiv 2306.10209, section 3.2"),
        )  # fmt: skip
    if zero.get("contiguous_gradients", True):
        yield make_line(
            "reduce bucket", (float(zero.get("reduce_bucket_size", 5e8)), settings.comm_bytes), "gpu", BUFFER,
            ("reduce_bucket_size x bytes", f"{STAGE_3}, ipg_buckets"),
        )  # fmt: skip
    yield make_line(
        "gradient of one tensor", (settings.largest_trained, width), "gpu", PASS,
        ("w x largest tensor", f"{STAGE_3}, reduce_independent_p_g_buckets"),
    )  # fmt: skip


STAGE_1_2 = "DeepSpeed runtime/zero/stage_1_and_2.py"
ALLREDUCE_NUMEL = 500_000_000
"""Gradients that stage 0 copies into one message (DeepSpeed runtime/engine.py, allreduce_no_retain)."""


def state_lines(settings: StateSettings) -> list[MemoryLine]:
    """Return the lines of weights, gradients, master weights, moments and ZeRO's buffers, of one process."""
    if settings.stage == 0:
        return [line for line in _stage_0(settings) if line.num_bytes]
    parts = stage_3_lines(settings) if settings.stage == 3 else _stage_1_and_2(settings)
    return [line for line in parts if line.num_bytes]


def _stage_0(settings: StateSettings) -> Iterator[MemoryLine]:
    trained, width, is_16_bit = settings.trained, settings.weight_bytes, settings.weight_bytes == 2
    source = "DeepSpeed runtime/fp16/unfused_optimizer.py" if is_16_bit else "DeepSpeed runtime/engine.py"
    yield from replicated_weights(settings)
    yield make_line("gradients", (trained, width), "gpu", STATE, ("w T", source))
    if is_16_bit:
        yield make_line("master weights", (trained, 4), "gpu", STATE, ("4 T", source))
        yield make_line("fp32 gradients", (trained, 4), "gpu", STEP, ("4 T", f"{source}, step"))
    yield optimizer_line(settings, 1.0, "gpu", source)
    message = min(trained, max(ALLREDUCE_NUMEL, settings.largest_trained))
    yield make_line(
        "all-reduce message", (message, width), "gpu", PASS,
        ("w min(T, 500 million)", "DeepSpeed runtime/engine.py, allreduce_no_retain"),
    )  # fmt: skip


def _stage_1_and_2(settings: StateSettings) -> Iterator[MemoryLine]:
    share, trained, width = 1 / settings.world_size, settings.trained, settings.weight_bytes
    offload = settings.offload("offload_optimizer")
    place: Place = "host" if offload else "gpu"
    yield from replicated_weights(settings)
    yield make_line(
        "master weights", (trained * share, settings.master_bytes), place, STATE,
        ("4 T / N, 2 T / N in bf16", f"{STAGE_1_2}, single_partition_of_fp32_groups"),
    )  # fmt: skip
    yield optimizer_line(settings, share, place, f"{ZERO_PAPER}.1")
    if settings.uses_bf16_optimizer:
        yield from _bf16_optimizer_gradients(settings)
        return
    yield from _offloaded_gradients(settings) if offload else _gradients_on_device(settings)
    if settings.stage == 1 and settings.accumulate > 1:
        # Whole until the last pass of a step, which reduces and frees them.
        yield make_line(
            "sum of gradients",
            (trained * (1 - share), width),
            "gpu",
            PASS,
            ("w T (1 - 1 / N)", f"{STAGE_1_2}, param.grad"),
        )
    zero, copies = settings.zero, 2 if settings.zero.get("overlap_comm") else 1
    if zero.get("contiguous_gradients", True):
        yield make_line(
            "reduce buckets", (float(zero.get("reduce_bucket_size", 5e8)) * copies, width), "gpu", PASS,
            (f"w x reduce_bucket_size{' x 2 (overlap_comm)' if copies == 2 else ''}", f"{STAGE_1_2}, setup_buckets"),
        )  # fmt: skip
    yield make_line(
        "gradient of one tensor", (settings.largest_trained, width), "gpu", PASS,
        ("w x largest tensor", f"{STAGE_1_2}, reduce_independent_p_g_buckets_and_remove_grads"),
    )  # fmt: skip


def _bf16_optimizer_gradients(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the gradients of bf16 at stage 1 with sums in fp32, which DeepSpeed gives to another optimizer."""
    source, trained = "DeepSpeed runtime/bf16_optimizer.py", settings.trained
    yield make_line("gradients", (trained, 6), "gpu", STATE, ("2 T, and 4 T for the fp32 sum", source))
    message = min(trained, max(ALLREDUCE_NUMEL, settings.largest_trained))
    yield make_line(
        "all-reduce message", (message, 4), "gpu", PASS,
        ("4 min(T, 500 million)", "DeepSpeed runtime/engine.py, allreduce_no_retain"),
    )  # fmt: skip


def _gradients_on_device(settings: StateSettings) -> Iterator[MemoryLine]:
    share, trained, width, wide = 1 / settings.world_size, settings.trained, settings.weight_bytes, settings.grad_bytes
    yield make_line("gradients", (trained * share, wide), "gpu", STATE, ("g T / N", f"{ZERO_PAPER}.2"))
    if wide == width:
        yield make_line(
            "gradients across partitions", (max(gradient_overlaps(settings)), width), "gpu", BUFFER,
            ("w (n - own part of n), tensors n across an end of a partition", f"{STAGE_1_2}, get_flat_partition"),
        )  # fmt: skip
    # A flat copy in the type of the master weights; the fp32 sum of 16-bit gradients is already flat.
    yield make_line(
        "flat gradients of the step", (trained * share, 0 if wide != width else settings.master_bytes), "gpu", STEP,
        ("m T / N", "dstrain/distributed/patches.py, flatten_gradients_in_fp32"),
    )  # fmt: skip
    if wide == width and settings.zero.get("contiguous_gradients", True):
        bucket = float(settings.zero.get("reduce_bucket_size", 5e8))
        yield make_line(
            "bucket of the last gradients", (min(bucket, trained), width), "gpu", STEP,
            ("w min(T, reduce_bucket_size): gradients are views of it", f"{STAGE_1_2}, param.grad"),
        )  # fmt: skip


def gradient_overlaps(settings: StateSettings) -> list[int]:
    """Return, for each process, the gradient values that it keeps of other partitions at stages 1 and 2.

    A tensor across the end of a partition has its whole gradient in both processes, whose parts are views of it.
    Partitions are equal parts of the matrices in their order; vectors form a small group of their own.
    """
    matrices = [one.numel for one in settings.shape.tensors if one.is_trainable and len(one.shape) > 1]
    share, overlaps, start = ceil(sum(matrices) / settings.world_size), [0] * settings.world_size, 0
    for size in matrices:
        end = start + size
        for rank in range(start // share, (end - 1) // share + 1):
            overlaps[rank] += size - (min(end, (rank + 1) * share) - max(start, rank * share))
        start = end
    return overlaps


def _offloaded_gradients(settings: StateSettings) -> Iterator[MemoryLine]:
    width, largest, own = settings.weight_bytes, settings.largest_trained, settings.trained / settings.world_size
    one = ("w x largest tensor", f"{STAGE_1_2}, temp_grad_buffer")
    yield make_line(
        "gradients",
        (own, settings.master_bytes),
        "host",
        STATE,
        ("4 T / N", f"{STAGE_1_2}, initialize_optimizer_states"),
    )
    yield make_line(
        "copy of the weights", (own, width), "host", BUFFER, ("w T / N", f"{STAGE_1_2}, param_buffer_of_bit16")
    )
    yield make_line("gradient of one tensor", (largest, width), "host", BUFFER, one)
    yield make_line("copied gradient", (largest, width), "gpu", BUFFER, one)
    if settings.accumulate > 1 and settings.grad_bytes != width:
        formula = ("g T / N, on the GPU also with offload", f"{STAGE_1_2}, _build_compact_grad_partition_buffer")
        yield make_line("sum of gradients", (own, settings.grad_bytes), "gpu", STATE, formula)
    elif settings.accumulate > 1:
        yield make_line(
            "sum of gradients", (own, width), "host", BUFFER, ("w T / N", f"{STAGE_1_2}, accumulated_grads_in_cpu")
        )


# Shapes: T tokens, H width, A heads times head width, K key-value heads times head width, I width of the MLP, R rank.


PAPER = "Korthikanti et al., arXiv 2205.05198, section 4, for gated MLPs and RMSNorm"
CHECKPOINT = "Chen et al., arXiv 1604.06174, section 3; torch/utils/checkpoint.py"
_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linear layers by their common input."""


@dataclass(frozen=True)
class LayerGraph:
    """Which inputs of one decoder layer autograd keeps."""

    is_recorded: bool
    """False where neither the layer nor anything before it is trained."""
    input_needs_grad: bool
    norms_trained: bool
    kept_inputs: frozenset[str]
    """Groups of linear layers that need their input: for the gradient of their weight, or of an adapter's."""
    adapter_rank: int
    """Sum of the ranks of all adapters in the layer."""


@lru_cache(maxsize=8)
def read_graphs(shape: ModelShape) -> tuple[LayerGraph, ...]:
    """Return the graph of each decoder layer, from the first to the last."""
    found: dict[int, list[tuple[str, bool, int]]] = {index: [] for index in range(shape.layers)}
    before = False
    for tensor in shape.tensors:
        language = tensor.part in ("layers", "lora") and "vision" not in tensor.name and "visual" not in tensor.name
        index = _layer_index(tensor.name) if language else None
        if index is None or index not in found:
            before = before or (tensor.is_trainable and tensor.part in ("embedding", "vision", "projector"))
            before = before or (tensor.is_trainable and tensor.part == "lora")
            continue
        rank = tensor.shape[0] if ".lora_A" in tensor.name else 0
        found[index].append((tensor.name, tensor.is_trainable, rank))
    graphs = []
    for index in range(shape.layers):
        graph = _read_graph(found[index], before)
        graphs.append(graph)
        before = graph.is_recorded
    return tuple(graphs)


def _read_graph(tensors: list[tuple[str, bool, int]], before: bool) -> LayerGraph:
    trained = [name for name, is_trainable, _ in tensors if is_trainable]
    kept = {group for group, names in _GROUPS.items() if any(f".{name}." in one for name in names for one in trained)}
    norms = any("norm" in name and "_norm." not in name.replace("layernorm", "") for name in trained)
    # Of families without these names: all inputs, if anything is trained.
    if trained and not kept and not norms:
        kept, norms = set(_GROUPS), True
    rank = sum(rank for _, _, rank in tensors)
    return LayerGraph(bool(trained) or before, before, norms, frozenset(kept), rank)


def _layer_index(name: str) -> int | None:
    words = name.split(".")
    at = next((i for i, word in enumerate(words[:-1]) if word in ("layers", "h", "layer", "blocks")), None)
    return int(words[at + 1]) if at is not None and words[at + 1].isdecimal() else None


def layer_bytes_per_token(shape: ModelShape, graph: LayerGraph, width: int, workload: Workload) -> float:
    """Return the bytes per token that autograd keeps of one decoder layer. `width`: bytes of a value."""
    if not graph.is_recorded:
        return 0.0
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm_input = 4 * shape.hidden + 4  # its fp32 copy and 1 / root mean square
    normed = (4 if shape.has_fp32_norms else width) * shape.hidden if graph.norms_trained else 0
    size = float(shape.norms_per_layer * (norm_input + normed))
    if not graph.input_needs_grad:
        size -= norm_input
    size += width * shape.hidden * sum(group in graph.kept_inputs for group in ("attention", "mlp"))
    if shape.has_qk_norm:
        size += (4 + (normed and width)) * (wide + narrow) + 4 * (shape.heads + shape.kv_heads)
    # Each query head gets a copy of its keys; one key head for all of them is expanded without a copy.
    keys = wide if (workload.has_mask or workload.is_eager) and shape.kv_heads > 1 else narrow
    if workload.has_mask:
        size += width * workload.length  # each call converts the boolean mask
    if workload.is_packed and workload.device == "cpu" and not workload.is_eager:
        # Queries, keys, values and weights; the output is the input of o_proj.
        size += width * (wide + 2 * keys) + workload.attention_weights(shape.heads, width)
        size += width * wide * ("output" in graph.kept_inputs)
    else:
        # Queries, keys, values and output of attention, and the fp32 normalizer of each head.
        size += width * (wide + 2 * keys + wide) + 4 * shape.heads
        if workload.is_packed and workload.device == "cpu":
            size += width * wide * ("output" in graph.kept_inputs)  # outputs of blocks, concatenated
    if workload.is_eager:
        # tanh of the soft cap, softmax in fp32, and its 16-bit copy, for each pair of tokens of a row.
        copies = 4 + (width if width == 2 else 0) + (width if shape.has_softcap else 0)
        size += copies * shape.heads * workload.length
    size += width * 3 * shape.intermediate  # gate, its activation, up
    size += width * shape.intermediate * ("down" in graph.kept_inputs)
    return size + width * graph.adapter_rank


def activation_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the decoder's activations, without head and images."""
    graphs, tokens = read_graphs(shape), workload.tokens
    per_layer = [layer_bytes_per_token(shape, graph, width, workload) for graph in graphs]
    formula = "T (8 H + 2 w H + w (2 A + 2 K + 4 I)) per layer"
    chosen = choose_layers(len(graphs), workload.checkpointed)
    number = sum((one.input_needs_grad or one.is_recorded) and is_on for one, is_on in zip(graphs, chosen, strict=True))
    inputs = number * width * shape.hidden * tokens
    yield MemoryLine("inputs of the layers", inputs, "gpu", "activation", "w T H per layer", CHECKPOINT, "pass")
    recomputed, kept = (
        [size for size, is_on in zip(per_layer, chosen, strict=True) if is_on is wanted] for wanted in (True, False)
    )
    size = round(max(recomputed, default=0) * tokens)
    yield MemoryLine("one recomputed layer", size, "gpu", "activation", formula, PAPER, "layer")
    size = round(sum(kept) * tokens)
    yield MemoryLine("activations of the layers", size, "gpu", "activation", formula, PAPER, "pass")
    yield MemoryLine(
        "embedding and last norm", outside_bytes(shape, workload, width), "gpu", "activation", "T (8 + 4 H + w H)",
        "transformers models/llama/modeling_llama.py", "pass",
    )  # fmt: skip
    angles = 2 * width * shape.head_dim * workload.positions
    yield MemoryLine(
        "rotary angles", angles, "gpu", "activation", "2 w L D", "Su et al., arXiv 2104.09864, eq. 34", "pass"
    )
    if any(graph.is_recorded for graph in graphs):
        inner = width * tokens * (3 * shape.intermediate + 2 * shape.hidden) + 4 * tokens * shape.hidden
        yield MemoryLine(
            "gradients inside a layer", inner, "gpu", "activation", "w T (3 I + 2 H) + 4 T H",
            "largest set of gradients that the MLP's backward pass holds", "layer",
        )  # fmt: skip


def outside_bytes(shape: ModelShape, workload: Workload, width: int) -> int:
    """Return what autograd keeps of the embedding and the last norm."""
    trained = {tensor.name.rpartition(".")[0].rpartition(".")[2] for tensor in shape.tensors if tensor.is_trainable}
    wide = 4 if shape.has_fp32_norms else width
    norm = 4 * shape.hidden + 4 + (wide * shape.hidden if "norm" in trained else 0)
    ids = 8 if any(tensor.is_trainable and tensor.part == "embedding" for tensor in shape.tensors) else 0
    rows = width * shape.hidden if workload.is_scored and not workload.is_packed else 0  # scores of every position
    return round(workload.tokens * (ids + norm + rows))


# Shapes: S positions of all images of a pass in the encoder, H its width, I width of its MLP, V pixel values of a patch,
# S' image tokens, H' width of the language model.


SOURCE = "transformers models/clip/modeling_clip.py and models/qwen2_5_vl/modeling_qwen2_5_vl.py"


def vision_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the images; each row has one image. `width`: bytes of a value."""
    vision = shape.vision
    if vision is None or not workload.images:
        return
    positions, tokens = vision.patches * workload.images, vision.tokens * workload.images
    names = [tensor.name.replace(".lora_", ".") for tensor in shape.tensors if tensor.is_trainable]
    trained = {part_of(name) for name in names}
    # The encoder casts its pixels, and keeps them for the gradient of its first weights.
    pixels = (4 + (width if "vision" in trained and width < 4 else 0)) * vision.patch_values * positions
    yield MemoryLine("pixels", pixels, "gpu", "activation", "4 V S; trained in 16 bits 6 V S", SOURCE, "pass")
    size = _encoder_layer_bytes(vision, width) * positions
    if "vision" in trained:
        yield from _trained_encoder_lines(vision, workload, width, size)
    else:
        yield MemoryLine(
            "one layer of the frozen encoder",
            size,
            "gpu",
            "activation",
            "w S (8 H + 3 I), nothing is kept",
            SOURCE,
            "layer",
        )
    if trained & {"vision", "projector"}:
        kept = _projector_bytes(shape, vision, width, positions, tokens)
        if vision.is_gated and "vision" not in trained:
            kept -= (4 * vision.hidden + 4) * positions  # the norm's input, which only the encoder's gradient needs
        formula = "w S' (H + 2 H'); Qwen2.5-VL: S (4 H + 4 w H + 4)"
        yield MemoryLine("activations of the projector", kept, "gpu", "activation", formula, SOURCE, "pass")


def _trained_encoder_lines(vision: VisionShape, workload: Workload, width: int, layer: int) -> Iterator[MemoryLine]:
    positions = vision.patches * workload.images
    recomputed = round(vision.layers * workload.checkpointed)
    inputs = width * positions * vision.hidden * recomputed
    yield MemoryLine("inputs of the encoder's layers", inputs, "gpu", "activation", "w S H per layer", SOURCE, "pass")
    # CLIP normalizes its embedded patches before the first layer.
    before = 0 if vision.is_gated else (width * vision.hidden + 8) * positions
    kept = layer * (vision.layers - recomputed) + before
    formula = "S (w (8 H + 3 I) + 4 heads + 16) per layer; Qwen2.5-VL: S (w (11 H + 4 I) + 8 H + 4 heads + 8)"
    yield MemoryLine("activations of the vision encoder", kept, "gpu", "activation", formula, SOURCE, "pass")


def _encoder_layer_bytes(vision: VisionShape, width: int) -> int:
    """Return the bytes per position that autograd keeps of one layer of the encoder."""
    if not vision.is_gated:
        # Inputs and outputs of two norms with mean and deviation, queries, keys, values and output of attention with
        # the fp32 normalizer of each head, input of fc1's activation, its sigmoid, and the input of fc2.
        return width * (8 * vision.hidden + 3 * vision.intermediate) + 4 * vision.heads + 16
    # The values are a view that keeps the whole output of the joint projection; rotated queries and keys, output of
    # attention, and its copy in the order of the patches; inputs of three projections. Norms as in the decoder.
    inner = width * (9 * vision.hidden + 4 * vision.intermediate) + 4 * vision.heads
    return inner + 2 * _rms_norm_bytes(vision.hidden, width)


def _projector_bytes(shape: ModelShape, vision: VisionShape, width: int, positions: int, tokens: int) -> int:
    """Return what autograd keeps of the projector; `positions`: in the encoder; `tokens`: image tokens."""
    if vision.is_gated:
        return positions * (_rms_norm_bytes(vision.hidden, width) + 3 * width * vision.hidden)
    return width * tokens * (vision.hidden + 2 * shape.hidden)


def _rms_norm_bytes(hidden: int, width: int) -> int:
    """Return an RMSNorm's input in fp32, its normalized input, and 1 / root mean square of a position."""
    return (4 + width) * hidden + 4
